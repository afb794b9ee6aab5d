"""Attention through block tables against float64: errors are those of rounding, and nothing else is read or written."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from paged_problems import Blocks, attend, broken, changed, excess, params_on, small_spec, solved, without_sinks
from problems import DTYPES, Case, Spec

from kvtier.errors import MismatchError
from kvtier.kernels import paged, reference, tables
from kvtier.kernels.params import AttentionParams

# The interpreter is numpy, which warns of what is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = int(os.environ.get("KVTIER_TEST_PROBLEMS", "75")) // 10  # random specs of each dtype


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_problems_are_as_exact_as_torch_and_read_nothing_else(dtype: torch.dtype, device: torch.device) -> None:
    found = []
    for number in range(CASES):
        case, exact = solved(small_spec(number, dtype))
        found += broken(case, exact, attend(case, device, parts=number % 4 or None))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_in_plain_torch_keeps_the_same_tolerance(dtype: torch.dtype, device: torch.device) -> None:
    found = []
    for number in range(CASES):
        case, exact = solved(small_spec(number, dtype))
        found += broken(case, exact, attend(case, device, tables.attend))
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 3, 16, 24, 64, 256])
def test_wherever_a_sequence_and_its_window_end_tokens_count_once(size: int, device: torch.device) -> None:
    found = []
    for n in (1, 2):
        if size == 256 and n == 2:
            continue
        lengths = tuple(max(1, n * size + d) for d in (-1, 0, 1))
        for window, parts in ((0, 1), (0, 3), (size, 2), (size + 1, 1)):
            spec = Spec(block_size=size, lengths=lengths, k_dim=16, v_dim=16, kv_heads=1, window=window, causal=True)
            case, exact = solved(changed(spec, group=2, seed=n))
            found += broken(case, exact, attend(case, device, parts=parts))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_size_is_as_exact(dtype: torch.dtype, device: torch.device) -> None:
    found = []
    sizes = (1, 2, 7, 15, 16, 17, 24, 31, 33, 40, 48, 64, 80, 96, 112, 128, 160, 256)
    for k_dim, v_dim in (*((size, size) for size in sizes), (192, 128), (576, 512)):
        case, exact = solved(Spec(dtype, 1, 3, 1, k_dim, v_dim, 5, (3, 10 + k_dim % 17), seed=k_dim))
        found += broken(case, exact, attend(case, device))
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_any_number_of_query_heads_shares_a_kv_head_with_any_number_of_queries(
    group: int, device: torch.device
) -> None:
    found = []
    for kv_heads, queries in ((1, 1), (2, 1 + group), (1, 70 // group)):
        spec = Spec(torch.float32, kv_heads, group, queries, 16, 16, 16, (75, 81), causal=True, seed=group)
        case, exact = solved(spec)
        found += broken(case, exact, attend(case, device))
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("told", [False, True], ids=["all", "positions"])
def test_tiles_that_all_queries_see_and_tiles_at_the_edge_are_as_exact(
    told: bool, dtype: torch.dtype, device: torch.device
) -> None:
    specs = [
        Spec(group=2, queries=100, lengths=(150, 101), block_size=64, causal=True),
        Spec(group=3, queries=25, lengths=(200, 70), block_size=16, causal=True, window=80, first_valid=(3, 0)),
        Spec(group=1, queries=130, lengths=(280,), block_size=24, causal=True, window=129, sinks=True),
        Spec(group=1, queries=70, lengths=(200,), block_size=16, causal=True, slopes=True, softcap=9.0),
        Spec(group=2, queries=35, lengths=(100, 160), block_size=256, mask=torch.bool, first_valid=(0, 50)),
        Spec(group=2, queries=35, lengths=(100, 160), block_size=16, causal=True, mask=torch.float32),
    ]
    found = []
    for number, spec in enumerate(specs):
        if (number + DTYPES.index(dtype)) % 2 == told:
            continue  # the interpreter is slow: each meets both in some dtype
        case, exact = solved(changed(spec, dtype=dtype, kv_heads=1, k_dim=32, v_dim=32, seed=9))
        blocks = Blocks(case, device)
        chosen = [range(n) for n in blocks.counts] if told else None
        result = attend(case, device, parts=1 + number % 3, blocks=blocks, table=blocks.table(chosen))
        found += broken(case, exact, result)
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("told", [False, True], ids=["all", "positions"])
def test_wherever_tiles_begin_and_end_tokens_count_once(told: bool, device: torch.device) -> None:
    # Of the sequence, the causal limit and the window, each edge meets each place within a tile of 32 tokens.
    found = []
    for n in range(100, 132):
        spec = Spec(kv_heads=1, queries=34, k_dim=16, v_dim=16, lengths=(n,), causal=True, window=41, seed=n)
        spec = changed(spec, block_size=1 if told else 16, first_valid=(n - 70,) if n % 2 else None)
        case, exact = solved(spec)
        blocks = Blocks(case, device)
        table = blocks.table([range(n)] if told else None)
        found += broken(case, exact, attend(case, device, parts=1, blocks=blocks, table=table))
    assert not found, "\n".join(found)


def test_the_number_of_programs_that_share_a_context_does_not_matter(device: torch.device) -> None:
    spec = Spec(kv_heads=1, group=3, queries=2, lengths=(100, 300, 2), causal=True, sinks=True, k_dim=16, v_dim=16)
    case, exact = solved(spec)
    whole = attend(case, device, parts=1)
    for parts in (2, 5, 18):
        result = attend(case, device, parts=parts)
        assert not broken(case, exact, result)
        torch.testing.assert_close(result.out, whole.out, rtol=1e-5, atol=1e-6)
        again = attend(case, device, parts=parts)
        assert torch.equal(again.out, result.out)
        assert torch.equal(again.lse, result.lse)


@pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=pytest.mark.slow) if x != torch.float32 else x for x in DTYPES], ids=str
)
def test_parts_of_sequences_merge_to_the_whole(dtype: torch.dtype, device: torch.device) -> None:
    # The blocks of a sequence are on host and device in any proportion, in any pattern.
    found = []
    for number in range(0, CASES, 3):
        case, exact = solved(small_spec(number, dtype, most_queries=17))
        blocks, r = Blocks(case, device), random.Random(number)
        where = [[r.choice((0, 0, 1, 2)) for _ in range(n)] for n in blocks.counts]
        parts = []
        for part in range(3):
            chosen = [[i for i, x in enumerate(row) if x == part] for row in where]
            params = case.params if part == 1 else without_sinks(case.params)  # counted once in all
            parts.append(
                paged.attend(
                    case.query.to(device),
                    blocks.table(chosen),
                    blocks.layout,
                    blocks.lengths,
                    params_on(params, device),
                    parts=number % 3 or None,
                )
            )
        out, lse = (x.cpu() for x in paged.merge(parts))
        found += [f"{w}: {case.spec}" for s, e in enumerate(exact) if (w := excess(case, s, e, out[s], lse[s]))]
    assert not found, "\n".join(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", [paged.attend, tables.attend], ids=["triton", "torch"])
def test_rows_of_one_and_of_many_queries_go_together(call: Any, dtype: torch.dtype, device: torch.device) -> None:
    found = []
    for number, counts in enumerate([(1, 7, 0, 3), (20, 1, 1, 33), (0, 0, 1, 0), (4, 4, 4, 4)]):
        spec = Spec(dtype, 1, 3, max(counts), 64, 64, 16, (90, 33, 40, 64), seed=number)
        spec = changed(spec, causal=True, window=(0, 30, 0, 17)[number], sinks=number > 1)
        mask = (None, torch.bool, None, torch.float32)[number]
        case, exact = solved(changed(spec, mask=mask, shared=(False, True, number < 3)))
        blocks, ends = Blocks(case, device), [sum(counts[:i]) for i in range(5)]
        params = case.params
        if params.mask is not None and params.mask.shape[2] > 1:
            # Each row's queries begin the mask's.
            moved = [x.roll(n, 1) for x, n in zip(params.mask, counts, strict=True)]
            params = AttentionParams(params.scale, 0.0, params.window, True, torch.stack(moved), sinks=params.sinks)
        query = torch.cat([q[:, q.shape[1] - n :] for q, n in zip(case.query, counts, strict=True)], 1).transpose(0, 1)
        options = {"parts": number + 1, "max_queries": max(counts)} if call is paged.attend else {}
        out, lse = call(
            query.to(device),
            blocks.table(),
            blocks.layout,
            blocks.lengths,
            params_on(params, device),
            cu_queries=torch.tensor(ends, dtype=torch.int32, device=device),
            **options,
        )
        assert out.shape == (sum(counts), 3, 64)
        for s, e in enumerate(exact):
            span = slice(ends[s], ends[s + 1])
            what = excess(case, s, e, out[span].transpose(0, 1).cpu(), lse[span].T.cpu())
            found.append(f"{what}: {case.spec}, row {s}" if what else "")
    assert not any(found), "\n".join(filter(None, found))


def test_how_many_queries_there_may_be_need_not_be_told(device: torch.device) -> None:
    case, _ = solved(Spec(group=2, queries=3, lengths=(20, 30), k_dim=16, v_dim=16, causal=True))
    blocks = Blocks(case, device)
    query = case.query.transpose(1, 2).flatten(0, 1).to(device)
    ends = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    call = (query, blocks.table(), blocks.layout, blocks.lengths, case.params)
    told, silent = (paged.attend(*call, cu_queries=ends, max_queries=n, parts=1) for n in (3, None))
    whole = paged.attend(case.query.to(device), *call[1:], parts=1)
    for a, b, c in zip(told, silent, whole, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.unflatten(0, (2, 3)).transpose(1, 2), c)


@pytest.mark.parametrize("call", [paged.attend, tables.attend], ids=["triton", "torch"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_queries_beyond_the_most_are_not_answered_and_need_no_mask(
    kind: torch.dtype, call: Any, device: torch.device
) -> None:
    counts, most = (5, 2, 0, 4), 3  # of three heads each: all queries of a row are in one tile
    case, _ = solved(Spec(torch.float32, 1, 3, 5, 16, 16, 16, (90, 33, 40, 64), causal=True, mask=kind, seed=7))
    blocks, ends = Blocks(case, device), [sum(counts[:i]) for i in range(5)]
    assert case.params.mask is not None
    tokens = case.params.mask.shape[3]
    whole = case.params.mask.expand(4, 3, 5, tokens).to(device)
    # A mask for so many queries, and behind it what must not be read.
    guard = torch.full((8 * tokens,), 0 if kind == torch.bool else torch.nan, device=device).to(kind)
    held = torch.cat([whole[:, :, :most].flatten(), guard])
    mask = held[: -guard.numel()].view(4, 3, most, tokens)
    query = torch.cat([q[:, :n] for q, n in zip(case.query, counts, strict=True)], 1).transpose(0, 1).to(device)

    def answered(mask: torch.Tensor, most: int, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full((11, 3, 16), 7.0, device=device), torch.full((11, 3), 7.0, device=device)
        cu = torch.tensor(ends, dtype=torch.int32, device=device)
        given = (
            query,
            blocks.table(),
            blocks.layout,
            blocks.lengths,
            AttentionParams(case.params.scale, causal=True, mask=mask),
        )
        return call(*given, cu_queries=cu, max_queries=most, out=out, lse=lse, **options)

    parts = {"parts": 1} if call is paged.attend else {}
    for found, right in zip(answered(mask, most, **parts), answered(whole, 5, **parts), strict=True):
        for start, end in pairwise(ends):
            first = slice(start, min(end, start + most))
            torch.testing.assert_close(found[first], right[first], rtol=1e-6, atol=1e-6)
            assert bool((found[first.stop : end] == 7.0).all())
    if call is paged.attend:
        with pytest.raises(MismatchError, match="where a row may have 4"):
            answered(mask, 4)


def test_a_row_without_blocks_gives_zeros_and_minus_infinity(device: torch.device) -> None:
    case, exact = solved(Spec(lengths=(40, 30), group=2, seed=1))
    blocks = Blocks(case, device)
    call = (case.query.to(device), blocks.table([[], [0, 1]]), blocks.layout, blocks.lengths)
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf], device=device)
    for parts in (1, 2):
        out, lse = (x.cpu() for x in paged.attend(*call, case.params, parts=parts))
        assert not out[0].count_nonzero()
        assert bool((lse[0] == -torch.inf).all())
        assert not excess(case, 1, exact[1], out[1], lse[1])
        out, lse = paged.attend(*call, AttentionParams(case.params.scale, sinks=sinks), parts=parts)
        assert not out[0].count_nonzero()
        torch.testing.assert_close(lse[0, :, 0], sinks)


def test_blocks_that_do_not_count_are_not_looked_at(device: torch.device) -> None:
    case, _ = solved(Spec(lengths=(60, 45), group=2, seed=1, k_dim=16, v_dim=16))
    blocks = Blocks(case, device)
    table = blocks.table([[0, 1], [0]])
    call = (case.query.to(device), blocks.layout, blocks.lengths, case.params)
    untold = tables.AddressTable(table.addresses, table.counts)
    for some in (table, untold):
        out, lse = paged.attend(call[0], some, *call[1:], parts=2)
        for row, n in ((0, 32), (1, 16)):
            k, v = case.keys[row][None, :, :n], case.values[row][None, :, :n]
            right, right_lse = reference.attend(case.query[row : row + 1], k, v, case.params, length=60 - 15 * row)
            torch.testing.assert_close(out[row].cpu(), right[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse[row].cpu(), right_lse[0], rtol=1e-5, atol=1e-6)


def test_an_empty_batch_and_an_empty_table_are_no_error(device: torch.device) -> None:
    case, _ = solved(Spec(lengths=(40,)))
    blocks = Blocks(case, device)
    none = tables.AddressTable(torch.empty((1, 0), dtype=torch.int64, device=device))
    out, lse = paged.attend(case.query.to(device), none, blocks.layout, 0, AttentionParams(1.0))
    assert not out.count_nonzero()
    assert bool((lse == -torch.inf).all())
    none = tables.AddressTable(torch.empty((0, 3), dtype=torch.int64, device=device))
    out, _ = paged.attend(case.query[:0].to(device), none, blocks.layout, 5, AttentionParams(1.0))
    assert out.shape == (0, 2, 1, 64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 5.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_any_scale_is_meant(scale: float, softcap: float, device: torch.device) -> None:
    case = Case(Spec(group=3, lengths=(37,), softcap=softcap))
    object.__setattr__(case.params, "scale", scale)
    result = attend(case, device)
    assert not excess(case, 0, case.exact(0), result.out[0], result.lse[0])


@pytest.mark.parametrize("kind", [torch.bool, *DTYPES], ids=str)
def test_any_layout_of_masks_queries_and_lengths_is_meant(kind: torch.dtype, device: torch.device) -> None:
    case, _ = solved(Spec(group=2, queries=3, lengths=(50, 50), mask=kind, seed=2, k_dim=16, v_dim=16))
    mask, query = case.params.mask, case.query
    assert mask is not None
    blocks = Blocks(case, device)

    def call(query: torch.Tensor, mask: torch.Tensor, lengths: Any) -> torch.Tensor:
        params = AttentionParams(case.params.scale, mask=mask)
        return paged.attend(query, blocks.table(), blocks.layout, lengths, params)[0]

    mask, query = mask.to(device), query.to(device)
    plain = call(query, mask, blocks.lengths)
    apart = torch.empty_strided(mask.shape, (1, 7, 50, 500), dtype=kind, device=device).copy_(mask)
    for other in (apart, mask.mT.contiguous().mT, mask.repeat(1, 1, 1, 2)):
        assert torch.equal(call(query, other, blocks.lengths), plain)
    for other in (query.mT.contiguous().mT, query.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(call(other, mask, blocks.lengths.int()), plain)
    assert torch.equal(call(query, mask, 50), plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_and_infinity_show_where_torch_shows_them(where: str, dtype: torch.dtype, device: torch.device) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        case = Case(Spec(dtype, 2, 2, lengths=(70,), k_dim=32, v_dim=32, seed=3, out_dtype=torch.float32))
        if where == "query":
            case.query[0, 1, 0, 5] = value
        else:
            (case.keys if where == "key" else case.values)[0][1, 45, 3] = value
        k, v = (x[0].float().repeat_interleave(2, 0) for x in (case.keys, case.values))
        plain = (case.query[0].float() @ k.mT * case.params.scale).softmax(-1) @ v
        for parts in (1, 3):
            out = attend(case, device, parts=parts).out[0]
            assert torch.equal(out.isnan(), plain.isnan()), value
            assert torch.equal(out.isinf(), plain.isinf()), value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_stays_in_its_sequence_and_its_head(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(Spec(dtype, 3, 2, 2, lengths=(30, 77, 7), seed=4, k_dim=16, v_dim=16))
    before = attend(case, device)
    case.keys[1][2, 50] = torch.nan
    after = attend(case, device)
    assert bool(after.out[1, 4:].isnan().all())
    for s, heads in ((0, slice(None)), (1, slice(0, 4)), (2, slice(None))):
        assert torch.equal(after.out[s, heads], before.out[s, heads])
        assert torch.equal(after.lse[s, heads], before.lse[s, heads])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case, _ = solved(Spec(group=2, lengths=(40, 30)))
    blocks, params = Blocks(case, device), AttentionParams(1.0)
    query, table = case.query.to(device), blocks.table()

    def call(**changes: Any) -> None:
        arguments = {"query": query, "table": table, "layout": blocks.layout, "lengths": 40, "params": params}
        paged.attend(**arguments | changes)

    call()
    ends = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    masks = ((3, 1, 1, 40), (1, 3, 1, 40), (1, 1, 2, 40), (1, 1, 1, 39))
    wrong: list[dict[str, Any]] = [
        {"query": query[0]},
        {"query": query[..., :-1]},
        {"query": query.half()},
        {"query": query[:1]},
        {"query": query[:, :3]},
        {"cu_queries": ends},
        {"query": query[:, :, 0], "cu_queries": ends[:2]},
        {"lengths": blocks.lengths[:1]},
        {"params": AttentionParams(1.0, first_valid=blocks.lengths[:1])},
        {"params": AttentionParams(1.0, sinks=torch.zeros(3, device=device))},
        {"params": AttentionParams(1.0, slopes=torch.zeros(5, device=device))},
        {"params": AttentionParams(1.0, mask=torch.zeros(2, 40, device=device))},
        {"params": AttentionParams(1.0, mask=torch.zeros((1, 1, 1, 40), dtype=torch.int32, device=device))},
        {"out": torch.empty((2, 4, 64), device=device)},
        {"out": torch.empty((2, 4, 1, 64), dtype=torch.float64, device=device)},
        {"out": torch.empty((2, 4, 1, 128), device=device)[..., ::2]},
        *({"params": AttentionParams(1.0, mask=torch.zeros(shape, device=device))} for shape in masks),
        {"lse": torch.empty((2, 4, 1), dtype=torch.float16, device=device)},
    ]
    for changes in wrong:
        with pytest.raises(MismatchError):
            call(**changes)
    for addresses in (table.addresses.int(), table.addresses[0], table.addresses.T):
        with pytest.raises(MismatchError):
            tables.AddressTable(addresses)
    for counts in (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(MismatchError):
            tables.AddressTable(table.addresses, counts.to(device))
