"""Attention on the host against float64: errors are those of rounding, and nothing is read that is not asked for.

The bounds are `problems.bound`.
"""

from __future__ import annotations

import functools
import os
import random

import pytest
import torch
from problems import DTYPES, NAN, Case, Exact, Packed, Paged, Result, Spec, attend, bound, changed, random_spec

from kvtier.cpu import native
from kvtier.kernels import reference
from kvtier.kernels.params import AttentionParams

CASES = int(os.environ.get("KVTIER_TEST_PROBLEMS", "48"))  # random specs of each dtype


@functools.cache
def random_case(number: int, dtype: torch.dtype) -> tuple[Case, list[Exact]]:
    return solved(random_spec(number, dtype))


@functools.cache
def solved(spec: Spec) -> tuple[Case, list[Exact]]:
    case = Case(spec)
    return case, [case.exact(s) for s in range(len(spec.lengths))]


def broken(case: Case, exact: list[Exact], result: Result) -> list[str]:
    """What is wrong with this result, and in which case."""
    found = [bound(case, s, e, result.out[s], result.lse[s]) for s, e in enumerate(exact)]
    if result.touched_outside():
        found.append("wrote outside of its results")
    return [f"{what}: {case.spec}" for what in found if what]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_problems_are_as_exact_as_torch_and_read_nothing_else(isa: str, dtype: torch.dtype) -> None:
    # Lengths, head sizes, groups, queries, blocks, masks, biases and layouts: see `random_spec`.
    found = []
    for number in range(0, CASES, 2 if isa == "portable" else 1):  # the same templates, many times as slow
        case, exact = random_case(number, dtype)
        found += broken(case, exact, attend(case))
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wherever_a_sequence_begins_and_ends_its_tokens_count_once(isa: str, dtype: torch.dtype) -> None:
    # The kernel works in tiles of a block or of 512 tokens, vectors of 8 to 32, groups of 4, 2 and 1 rows: all edges
    # are near these.
    r = random.Random(0)
    found = []
    for rows in (1, 2, 3, 4, 5, 6, 7):
        for size in (1, 64, 300, 600):
            lengths = (r.choice((255, 256, 257)), r.choice((511, 512, 513, 520)), r.randint(257, 1200))
            first_valid = (r.choice((0, 1, 7, 249)), r.choice((0, 3, 100, 249)), r.randint(0, 256))
            dims = {"k_dim": r.choice((8, 64)), "v_dim": r.choice((8, 33, 64))}
            spec = Spec(dtype, 1, rows, block_size=size, lengths=lengths, first_valid=first_valid, seed=rows, **dims)
            for one in (spec, changed(spec, first_valid=None)):
                case, exact = solved(one)
                found += broken(case, exact, attend(case))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_size_is_as_exact(isa: str, dtype: torch.dtype) -> None:
    found = []
    sizes = (*range(1, 36), 48, 64, 80, 96, 128, 160, 192, 256)
    for k_dim, v_dim in (*((size, size) for size in sizes), (192, 128), (576, 512)):
        case, exact = solved(Spec(dtype, 1, 3, 1, k_dim, v_dim, 5, (1, 10 + k_dim % 17), seed=k_dim))
        found += broken(case, exact, attend(case))
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_many_rows_to_a_kv_head_are_as_exact(isa: str, dtype: torch.dtype, causal: bool) -> None:
    # 64 rows are computed at once; from 160 on, keys and values are packed.
    found = []
    for group, queries, k_dim, v_dim, size, length in (
        (1, 17, 64, 64, 16, 300),
        (4, 16, 128, 128, 7, 515),
        (3, 33, 80, 96, 256, 257),
        (5, 13, 33, 17, 1, 40),
        (16, 9, 256, 8, 64, 129),
        (2, 70, 1, 64, 300, 71),
        (1, 159, 64, 64, 16, 300),
        (1, 160, 64, 64, 16, 300),
        (1, 161, 80, 96, 7, 515),
        (4, 65, 128, 128, 256, 257),
        (5, 33, 33, 17, 1, 40),
        (16, 12, 256, 8, 64, 129),
    ):
        spec = Spec(dtype, 2, group, queries, k_dim, v_dim, size, (length, queries), causal=causal, seed=queries)
        case, exact = solved(spec)
        found += broken(case, exact, attend(case))
    assert not found, "\n".join(found)


# Several shares of a sequence's queries, for one KV head each; see `Job::add`. From 32 rows to a KV head on there is
# one for each, and from 384 on several.
PROMPTS = [
    Spec(kv_heads=2, group=4, queries=100, k_dim=32, v_dim=32, block_size=16, lengths=(700,), causal=True),
    Spec(kv_heads=1, group=1, queries=700, k_dim=64, v_dim=64, block_size=64, lengths=(700,), causal=True),
    Spec(kv_heads=3, group=2, queries=193, k_dim=17, v_dim=33, block_size=7, lengths=(515, 200), causal=True),
    Spec(kv_heads=2, group=4, queries=97, k_dim=64, v_dim=80, block_size=256, lengths=(700,), causal=True, window=31),
    Spec(kv_heads=2, group=4, queries=97, k_dim=64, v_dim=64, block_size=1, lengths=(130,), window=5, sinks=True),
    Spec(kv_heads=1, group=4, queries=130, lengths=(600, 300), causal=True, window=257, first_valid=(400, 0)),
    Spec(kv_heads=1, group=96, queries=5, k_dim=32, v_dim=32, lengths=(300,), causal=True, softcap=5.0),
    Spec(kv_heads=2, group=4, queries=100, k_dim=32, v_dim=32, lengths=(520,), causal=True, slopes=True, sharpness=3.0),
    Spec(kv_heads=2, group=4, queries=100, k_dim=32, v_dim=32, lengths=(520, 130), mask=torch.bool, scattered=True),
    Spec(kv_heads=2, group=4, queries=100, k_dim=32, lengths=(520,), mask=torch.bool, shared=(True, True, False)),
    Spec(kv_heads=2, group=4, queries=100, k_dim=32, lengths=(520,), mask=torch.float32, causal=True, sinks=True),
    Spec(kv_heads=2, group=4, queries=100, k_dim=32, lengths=(520,), mask=torch.bfloat16, shared=(True, False, False)),
    # A share is cut over its blocks where there are few shares.
    Spec(kv_heads=1, group=4, queries=40, k_dim=128, v_dim=128, block_size=64, lengths=(17_001,), causal=True),
    Spec(kv_heads=1, group=1, queries=32, k_dim=128, v_dim=128, lengths=(9_001, 8_000), window=8_500, causal=True),
]


# A window, or padding, that begins within a block; blocks of more than a tile; as many heads as are at work at once;
# halves and quarters of the heads, of few blocks and of one.
BEGINNINGS = [
    Spec(
        kv_heads=4,
        group=2,
        k_dim=128,
        v_dim=128,
        block_size=256,
        lengths=(700, 250),
        causal=True,
        window=600,
        sinks=True,
    ),
    Spec(kv_heads=8, group=2, k_dim=128, v_dim=64, block_size=1024, lengths=(1500,), first_valid=(7,), slopes=True),
    Spec(kv_heads=16, group=1, k_dim=32, v_dim=32, block_size=2, lengths=(260, 33), causal=True, window=101),
    Spec(kv_heads=17, group=1, k_dim=8, v_dim=8, block_size=1024, lengths=(1500,), first_valid=(7,)),
    Spec(kv_heads=2, group=4, k_dim=64, v_dim=64, block_size=513, lengths=(1540,), causal=True, window=1030),
    Spec(kv_heads=3, group=7, k_dim=64, v_dim=64, block_size=15, lengths=(400, 77), causal=True, window=64),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wherever_in_a_block_a_sequence_begins_it_is_as_exact(isa: str, dtype: torch.dtype) -> None:
    found = []
    for spec in BEGINNINGS:
        case, exact = solved(changed(spec, dtype=dtype))
        found += broken(case, exact, attend(case))
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_whose_queries_are_shared_out_are_as_exact(isa: str, dtype: torch.dtype) -> None:
    found = []
    for spec in PROMPTS[:: 3 if isa == "portable" else 1]:
        case, exact = solved(changed(spec, dtype=dtype))
        one, three = attend(case), attend(case, threads=3)
        found += broken(case, exact, one)
        if not torch.equal(one.out, three.out) or not torch.equal(one.lse, three.lse):
            found.append(f"other bits on three threads: {spec}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ragged_batch_of_prompts_and_tokens_is_as_exact(isa: str, dtype: torch.dtype) -> None:
    spec = Spec(dtype, 2, 4, 150, 32, 32, lengths=(700, 150, 333, 600), causal=True, mask=torch.bool, sinks=True)
    case, exact = solved(spec)
    paged, packed = Paged(case), Packed(case, [150, 1, 0, 97], four=True)
    native.attend(
        paged.shape,
        packed.query,
        paged.sequences(),
        packed.params,
        threads=2,
        out=packed.out,
        lse=packed.lse,
        cu_queries=packed.cu_queries,
    )
    assert not [what for s, e in enumerate(exact) if (what := bound(case, s, e, *packed.row(s)))]
    assert not packed.touched_outside()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        # As many tasks as one sequence is ever split into, in fp32; the others are split into a few of 1 MiB.
        Spec(kv_heads=1, lengths=(70_000,), block_size=256),
        Spec(kv_heads=1, group=4, lengths=(20_001, 1, 5), block_size=300, k_dim=32, v_dim=32, sharpness=8.0),
        Spec(
            kv_heads=2, group=2, lengths=(10_011, 4_190), block_size=16, first_valid=(4_500, 0), sinks=True, slopes=True
        ),
        Spec(kv_heads=4, group=1, lengths=(9_001,), block_size=64, queries=3, causal=True, window=5_000),
        Spec(kv_heads=1, group=5, lengths=(9_003,), block_size=7, k_dim=96, v_dim=96, softcap=20.0, mask=torch.bool),
    ],
    ids=lambda spec: "-".join(map(str, spec.lengths)),
)
def test_long_sequences_are_as_exact(isa: str, dtype: torch.dtype, spec: Spec) -> None:
    case, exact = solved(changed(spec, dtype=dtype))
    assert not broken(case, exact, attend(case))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_sequences_merge_to_the_whole(isa: str, dtype: torch.dtype) -> None:
    # The blocks of a sequence are on host and device in any proportion, in any pattern.
    found = []
    for number in range(0, CASES, 3):
        case, exact = random_case(number, dtype)
        paged, r = Paged(case), random.Random(number)
        where = [[r.choice((0, 0, 1, 2)) for _ in row] for row in paged.addresses]
        parts = []
        for part in range(3):
            chosen = [[i for i, x in enumerate(row) if x == part] for row in where]
            params = case.params if part == 1 else without_sinks(case.params)  # counted once in all
            result = Result(changed(case.spec, out_dtype=torch.float32))
            native.attend(
                paged.shape,
                case.query,
                paged.sequences(chosen),
                params,
                threads=1,
                out=result.out,
                lse=result.lse,
            )
            parts.append((result.out, result.lse))
        whole = Result(case.spec)
        out, lse = reference.merge(parts)
        whole.out.copy_(out)
        whole.lse.copy_(lse)
        found += broken(case, exact, whole)
    assert not found, "\n".join(found)


def without_sinks(params: AttentionParams) -> AttentionParams:
    return AttentionParams(
        params.scale, params.softcap, params.window, params.causal, params.mask, params.first_valid, None, params.slopes
    )


def test_a_sequence_without_blocks_gives_zeros_and_minus_infinity(isa: str) -> None:
    case, exact = solved(Spec(lengths=(40, 30), group=2, seed=1))
    paged, result = Paged(case), Result(case.spec)
    sequences = paged.sequences([[], [0, 1]])
    native.attend(paged.shape, case.query, sequences, case.params, threads=1, out=result.out, lse=result.lse)
    assert not result.out[0].count_nonzero()
    assert bool((result.lse[0] == -torch.inf).all())
    assert not bound(case, 1, exact[1], result.out[1], result.lse[1])
    # The same where the sequence itself is empty; but sinks still count.
    sequences = paged.sequences([[0, 1, 2], []])
    sequences.set_lengths([40, 0])
    params = AttentionParams(case.params.scale, sinks=torch.tensor([0.5, -1.0, 2.0, -torch.inf]))
    native.attend(paged.shape, case.query, sequences, params, threads=1, out=result.out, lse=result.lse)
    assert not result.out[1].count_nonzero()
    assert torch.equal(result.lse[1, :, 0], params.sinks)


def test_an_empty_batch_and_a_batch_without_queries_are_no_errors(isa: str) -> None:
    shape, params = native.Shape(torch.float32, 2, 64, 64, 16), AttentionParams(1.0)
    for rows, queries in ((0, 1), (2, 0)):
        query = torch.empty(rows, 4, queries, 64)
        out = native.attend(shape, query, native.Sequences(rows, 0), params, threads=2)
        assert out.shape == (rows, 4, queries, 64)
        native.submit(shape, query, native.Sequences(rows, 0), params, threads=2).wait()
    out = native.attend(
        shape, query[0, :, 0:0].mT.reshape(0, 4, 64), native.Sequences(0, 0), params, threads=1, cu_queries=[0]
    )
    assert out.shape == (0, 4, 64)


# Runs and ragged batches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_how_blocks_are_grouped_into_runs(isa: str, dtype: torch.dtype) -> None:
    specs = [random_spec(number, dtype) for number in range(0, CASES, 6)]
    # Several tasks for each sequence, whose ends are within runs.
    specs.append(Spec(dtype, 4, 2, lengths=(9_000, 20_011), block_size=64, seed=1))
    specs.append(Spec(dtype, 4, 2, 3, lengths=(30_000,), block_size=16, causal=True, window=17_000, seed=2))
    for spec in specs:
        case, r = Case(spec), random.Random(spec.seed)
        paged = Paged(case)
        some = [[i for i in range(len(row)) if r.random() < 0.8] for row in paged.addresses]
        for chosen in (None, some):
            results = []
            for cut in (0.0, 1.0, 0.3):
                result = Result(spec)
                sequences = paged.sequences(chosen, cut=cut)
                native.attend(
                    paged.shape, case.query, sequences, case.params, threads=1, out=result.out, lse=result.lse
                )
                results.append(result)
            if chosen is None:
                # Nor on blocks that no query sees.
                first = (spec.lengths[0] - spec.queries - spec.window + 1) // spec.block_size if spec.window else 0
                seen = [[i for i in range(len(row)) if spec.lengths[1:] or i >= first] for row in paged.addresses]
                results.append(Result(spec))
                out, lse = results[-1].out, results[-1].lse
                native.attend(paged.shape, case.query, paged.sequences(seen), case.params, threads=1, out=out, lse=lse)
            for other in results[1:]:
                assert torch.equal(other.out, results[0].out), spec
                assert torch.equal(other.lse, results[0].lse), spec


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_batches_are_as_exact_and_write_nothing_else(isa: str, dtype: torch.dtype) -> None:
    found = []
    for number in range(0, CASES, 6 if isa == "portable" else 2):
        case, exact = random_case(number, dtype)
        spec, r = case.spec, random.Random(number)
        counts = [r.choice((0, 1, r.randint(0, spec.queries), spec.queries)) for _ in spec.lengths]
        paged, packed = Paged(case), Packed(case, counts, four=number % 4 == 0)
        native.attend(
            paged.shape,
            packed.query,
            paged.sequences(),
            packed.params,
            threads=1,
            out=packed.out,
            lse=packed.lse,
            cu_queries=packed.cu_queries,
        )
        found += [
            f"{what}: {spec}, {counts}" for s, e in enumerate(exact) if (what := bound(case, s, e, *packed.row(s)))
        ]
        if packed.touched_outside():
            found.append(f"wrote outside of its results: {spec}")
    assert not found, "\n".join(found)


def test_rows_of_a_ragged_batch_are_the_float64_reference_of_each_alone(isa: str) -> None:
    # The reference is another program, and knows neither blocks nor batches of different lengths.
    spec = Spec(group=3, queries=5, lengths=(700, 5, 64, 129), block_size=16, causal=True, window=90, slopes=True)
    case, counts = Case(spec), [1, 5, 0, 3]
    paged, params = Paged(case), case.params
    for four in (False, True):
        packed = Packed(case, counts, four=four)
        out = native.attend(
            paged.shape,
            packed.query,
            paged.sequences(),
            params,
            threads=2,
            lse=packed.lse,
            cu_queries=packed.cu_queries,
        )
        assert out.shape == packed.out.shape
        packed.out.copy_(out)
        for row, n in enumerate(counts):
            query = case.query[row : row + 1, :, spec.queries - n :].double()
            tensors = (query, case.keys[row][None].double(), case.values[row][None].double())
            right = reference.attend(*tensors, params) if n else (query[..., :64], query[..., 0])
            torch.testing.assert_close(packed.row(row)[0].double(), right[0][0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(packed.row(row)[1].double(), right[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(isa: str, dtype: torch.dtype) -> None:
    spec = Spec(dtype, 2, 3, 2, lengths=(9_000, 17, 700, 64), block_size=64, causal=True, seed=3)
    case = Case(spec)
    paged, together = Paged(case), Result(spec)
    native.attend(
        paged.shape, case.query, paged.sequences(), case.params, threads=1, out=together.out, lse=together.lse
    )
    packed = Packed(case, [2, 0, 2, 1], four=False)
    native.attend(
        paged.shape,
        packed.query,
        paged.sequences(),
        packed.params,
        threads=3,
        out=packed.out,
        lse=packed.lse,
        cu_queries=packed.cu_queries,
    )
    everything = paged.sequences()
    for row in range(len(spec.lengths)):
        alone = native.Sequences(1, paged.stride)
        alone.set_runs(0, everything.runs(row))
        alone.set_length(spec.lengths[row])
        out = native.attend(paged.shape, case.query[row : row + 1], alone, case.params, threads=2)
        assert torch.equal(out[0], together.out[row])
        if packed.counts[row] == spec.queries:
            assert torch.equal(packed.row(row)[0], together.out[row])
            assert torch.equal(packed.row(row)[1], together.lse[row])


def test_blocks_that_no_query_sees_are_not_read(isa: str) -> None:
    # They may have been freed: their addresses are none.
    spec = Spec(group=2, queries=3, lengths=(1000, 2000), block_size=16, window=200, first_valid=(900, 0), causal=True)
    case, exact = solved(spec)
    paged = Paged(case)
    for row, first in enumerate((900, 2000 - 3 - 200 + 1)):
        paged.addresses[row][: first // 16] = [8] * (first // 16)
        paged.addresses[row] += [8, 8]
    for cut in (0.0, 1.0):
        result = Result(spec)
        sequences = paged.sequences(cut=cut)
        native.attend(paged.shape, case.query, sequences, case.params, threads=1, out=result.out, lse=result.lse)
        assert not broken(case, exact, result)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 5.0])
@pytest.mark.parametrize("length", [3, 37, 300])
def test_any_scale_is_meant(isa: str, scale: float, length: int) -> None:
    case = Case(Spec(group=3, lengths=(length,), sharpness=1.0))
    object.__setattr__(case.params, "scale", scale)
    exact = case.exact(0)
    result = attend(case)
    assert not bound(case, 0, exact, result.out[0], result.lse[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_highest_score_has_its_weight_however_high_it_is(isa: str, dtype: torch.dtype) -> None:
    # From about 1e9 on, half a step of a score in fp32 is more than `exp` has room for.
    found = []
    for sharpness, group in ((1e7, 1), (1.4e9, 3), (1e12, 1), (1e12, 160)):
        case, exact = solved(Spec(dtype, 1, group, lengths=(100,), sharpness=sharpness))
        found += broken(case, exact, attend(case))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", [torch.bool, *DTYPES], ids=str)
def test_any_layout_of_a_mask_and_of_queries_is_meant(isa: str, kind: torch.dtype) -> None:
    case, exact = solved(Spec(group=2, queries=3, lengths=(50, 70), mask=kind, seed=2))
    mask = case.params.mask
    assert mask is not None
    plain = attend(case).out
    apart = torch.empty_strided(mask.shape, (1, 7, 50, 500), dtype=kind).copy_(mask)
    for other in (apart, mask.mT.contiguous().mT, mask.repeat(1, 1, 1, 2)):
        object.__setattr__(case.params, "mask", other)
        assert torch.equal(attend(case).out, plain)
    object.__setattr__(case.params, "mask", mask)
    case.query = case.query.mT.contiguous().mT  # a stride within a head
    assert torch.equal(attend(case).out, plain)
    assert exact


@functools.cache
def spoilt(dtype: torch.dtype, where: str, length: int, value: float) -> tuple[Case, Exact, torch.Tensor]:
    """A problem with one number that is not finite, its answer in float64, and that of torch's operations in fp32.

    Torch's fused attention is no measure here: it gives zeros for some rows with an infinite score.
    """
    case = Case(Spec(dtype, 2, 2, lengths=(length,), k_dim=32, v_dim=32, block_size=64, seed=3))
    if where == "query":
        case.query[0, 1, 0, 5] = value
    elif where == "key":
        case.keys[0][1, length * 2 // 3, 3] = value
    elif where == "value":
        case.values[0][0, length * 2 // 3, 3] = value
    else:
        case.keys[0][1] = value
    k, v = (x[0].float().repeat_interleave(2, 0) for x in (case.keys, case.values))
    scores = case.query[0].float() @ k.mT * case.params.scale
    nothing = (scores == -torch.inf).all(-1, keepdim=True)  # the same as a query that sees nothing
    return case, case.exact(0), (scores.softmax(-1) @ v).masked_fill(nothing, 0.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value", "all keys"])
@pytest.mark.parametrize("length", [1, 300, 21_000])
def test_nan_and_infinity_show_where_torch_shows_them(isa: str, dtype: torch.dtype, where: str, length: int) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        case, exact, plain = spoilt(dtype, where, length, value)
        result = attend(case)
        for right in (plain, exact.out):
            assert torch.equal(result.out[0].isnan(), right.isnan()), value
            assert torch.equal(result.out[0].isinf(), right.isinf()), value
        assert torch.equal(result.lse[0].isfinite(), exact.lse.isfinite()), value
        sound = exact.out.isfinite()
        torch.testing.assert_close(result.out[0].double()[sound], exact.out[sound], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_stays_in_its_sequence_and_its_head(isa: str, dtype: torch.dtype) -> None:
    case = Case(Spec(dtype, 3, 2, 2, lengths=(100, 333, 7), seed=4))
    before = attend(case)
    case.keys[1][2, 50] = torch.nan
    after = attend(case)
    assert bool(after.out[1, 4:].isnan().all())
    for s, heads in ((0, slice(None)), (1, slice(0, 4)), (2, slice(None))):
        assert torch.equal(after.out[s, heads], before.out[s, heads])
        assert torch.equal(after.lse[s, heads], before.lse[s, heads])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_that_earlier_calls_left_behind_does_not_matter(isa: str, dtype: torch.dtype) -> None:
    # Threads keep their scratch memory: here it is full of NaN from a call in another dtype.
    cases = [Case(Spec(dtype, 2, 3, lengths=(n,), first_valid=(f,), seed=n)) for n, f in ((3, 0), (271, 8), (512, 249))]
    dirty = Case(Spec(torch.float32, 4, 16, 4, 256, 256, 64, (600,), seed=5))
    dirty.query.view(torch.uint8).fill_(NAN) if dirty.query.is_contiguous() else dirty.query.fill_(torch.nan)
    for case in cases:
        clean = attend(case)
        attend(dirty)
        again = attend(case)
        assert torch.equal(clean.out, again.out)
        assert torch.equal(clean.lse, again.lse)


# The reference in torch


def by_reference(case: Case, s: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    spec, params = case.spec, case.params
    keys, values = case.keys[s][None], case.values[s][None]
    if positions is not None:
        keys, values = keys[:, :, positions], values[:, :, positions]
    mask = case.mask_of(s)
    one = AttentionParams(
        params.scale,
        params.softcap,
        params.window,
        params.causal,
        None if mask is None else mask[None],
        None if params.first_valid is None else params.first_valid[s : s + 1],
        params.sinks,
        params.slopes,
    )
    return reference.attend(case.query[s : s + 1], keys, values, one, length=spec.lengths[s], positions=positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_keeps_the_same_bound(dtype: torch.dtype) -> None:
    found = []
    for number in range(CASES):
        case, exact = random_case(number, dtype)
        for s, right in enumerate(exact):
            out, lse = by_reference(case, s)
            assert out.dtype == dtype
            found.append(f"{what}: {case.spec}" if (what := bound(case, s, right, out[0], lse[0])) else "")
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_the_reference_merge_to_the_whole(dtype: torch.dtype) -> None:
    found = []
    for number in range(1, CASES, 3):
        case, exact = random_case(number, dtype)
        if case.params.sinks is not None:
            continue
        query = case.query
        for s, right in enumerate(exact):
            place = torch.randint(0, 3, (case.spec.lengths[s],), generator=torch.Generator().manual_seed(number))
            case.query = query.float()  # so that parts are in fp32
            parts = [by_reference(case, s, (place == part).nonzero()[:, 0]) for part in range(3)]
            case.query = query
            out, lse = reference.merge(parts)
            found.append(f"{what}: {case.spec}" if (what := bound(case, s, right, out[0], lse[0])) else "")
    assert not any(found), "\n".join(filter(None, found))


def test_the_reference_in_float64_is_the_answer() -> None:
    for number in range(0, CASES, 5):
        case, exact = random_case(number, torch.float32)
        wide = Case(case.spec)
        wide.query, wide.keys = wide.query.double(), [x.double() for x in wide.keys]
        wide.values = [x.double() for x in wide.values]
        for s, right in enumerate(exact):
            out, lse = by_reference(wide, s)
            torch.testing.assert_close(out[0], right.out, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(lse[0], right.lse, rtol=1e-10, atol=1e-10)


def test_a_query_of_the_reference_that_sees_nothing_gives_zeros_and_minus_infinity() -> None:
    query, keys, values = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 6)
    unseen = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    sinks = torch.tensor([1.0, -2.0, 0.0, -torch.inf])
    for params, some in ((AttentionParams(1.0, mask=unseen), slice(None)), (AttentionParams(1.0), slice(0, 0))):
        out, lse = reference.attend(query, keys[:, :, some], values[:, :, some], params, length=5)
        assert out.shape == (1, 4, 2, 6)
        assert not out.count_nonzero()
        assert bool((lse == -torch.inf).all())
        with_sinks = AttentionParams(1.0, mask=params.mask, sinks=sinks)
        out, lse = reference.attend(query, keys[:, :, some], values[:, :, some], with_sinks, length=5)
        assert not out.count_nonzero()
        assert torch.equal(lse[0], sinks[:, None].expand(4, 2))


def test_merging_nothing_changes_nothing() -> None:
    out, lse = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1)
    empty = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for parts in ([(out, lse)], [(out, lse), empty], [empty, (out, lse), empty]):
        merged, together = reference.merge(parts)
        assert torch.equal(merged, out)
        torch.testing.assert_close(together, lse, rtol=1e-6, atol=1e-7)
    nothing, none = reference.merge([empty, empty])
    assert not nothing.count_nonzero()
    assert bool((none == -torch.inf).all())
