"""What the native library reads of sequences is what was set, after any change."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from problems import Case, Paged, Spec

from kvtier.cpu import native
from kvtier.errors import KVTierError
from kvtier.kernels.params import AttentionParams

STRIDE = 100


class _Run(ctypes.Structure):
    _fields_ = (("address", ctypes.c_int64), ("index", ctypes.c_int32), ("count", ctypes.c_int32))


class _Sequence(ctypes.Structure):
    _fields_ = (("runs", ctypes.POINTER(_Run)), ("run_count", ctypes.c_int64), ("length", ctypes.c_int64))


def read(sequences: native.Sequences) -> list[tuple[list[tuple[int, int, int]], int]]:
    """Runs and length of each row, as C reads them."""
    rows = (_Sequence * sequences.rows).from_address(sequences.address)
    return [([(r.address, r.index, r.count) for r in row.runs[: row.run_count]], row.length) for row in rows]


@pytest.mark.parametrize("seed", range(10))
def test_the_library_reads_what_was_set_after_any_change(seed: int) -> None:
    r = random.Random(seed)
    rows = r.randint(1, 4)
    sequences = native.Sequences(rows, STRIDE)
    address = sequences.address
    expected: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    lengths = [0] * rows
    for _ in range(200):
        act, row = r.choice(("set", "append", "append", "append", "extend", "length", "lengths")), r.randrange(rows)
        last = expected[row][-1] if expected[row] else (0, 0, 0)
        behind = (last[0] + last[2] * STRIDE, last[1] + last[2])
        if act == "set":
            expected[row] = [(r.getrandbits(47), 7 * i, r.randint(1, 5)) for i in range(r.randint(0, 4))]
            sequences.set_runs(row, expected[row])
        elif act == "append":
            # Elsewhere, or a neighbour in memory but not in the sequence.
            new = (
                r.choice((behind[0], r.getrandbits(47) + 2**47)),
                behind[1] + r.randint(1, 2**20),
                r.randint(1, 2**9),
            )
            sequences.append_run(row, *new)
            expected[row].append(new)
        elif act == "extend" and last[2]:
            n = r.randint(1, 9)
            sequences.append_run(row, *behind, n)
            expected[row][-1] = (last[0], last[1], last[2] + n)
        elif act == "length":
            lengths = [r.getrandbits(40)] * rows
            sequences.set_length(lengths[0])
        else:
            lengths = [r.getrandbits(40) for _ in range(rows)]
            sequences.set_lengths(lengths)
        assert read(sequences) == list(zip(expected, lengths, strict=True))
        assert [sequences.runs(i) for i in range(rows)] == expected
        assert sequences.lengths == lengths
        assert sequences.address == address


def test_one_length_for_each_row_is_asked_for() -> None:
    for wrong in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="structure"):
            native.Sequences(2, STRIDE).set_lengths(wrong)
    native.Sequences(0, STRIDE).set_length(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_that_repeats_reads_what_changed_since(kernel: None, dtype: torch.dtype) -> None:
    # As a decode step does: one token more, now and then a block more, new tensors each time.
    case = Case(Spec(dtype, group=2, lengths=(300, 300), block_size=16, seed=1))
    paged, r = Paged(case), random.Random(0)
    sequences = native.Sequences(2, paged.stride, keep=paged.memory)
    blocks, prepared = 0, set()
    for length in (*range(1, 200), 17, 300):
        for index in range(blocks, -(-length // 16)):
            for row in range(2):
                sequences.append_run(row, paged.addresses[row][index], index)
        blocks = max(blocks, -(-length // 16))
        sequences.set_length(length)
        query = torch.randn_like(case.query)
        params = AttentionParams(0.1, causal=r.random() < 0.1)
        out = native.attend(paged.shape, query, sequences, params, threads=1)
        fresh = native.Sequences(2, paged.stride)
        for row in range(2):
            fresh.set_runs(row, sequences.runs(row))
        fresh.set_length(length)
        assert torch.equal(out, native.attend(paged.shape, query, fresh, params, threads=1))
        prepared.add(id(sequences.prepared[0]))
    assert len(sequences.prepared) == 1


@pytest.mark.parametrize("results", ["new", "given", "packed"])
def test_whatever_changes_between_two_calls_is_noticed(kernel: None, results: str) -> None:
    """A prepared call that is repeated where it does not fit would read and write outside of its tensors."""
    case = Case(Spec(group=2, queries=3, lengths=(70, 90), block_size=16, seed=2))
    paged = Paged(case)
    used = paged.sequences()
    plain = AttentionParams(0.1)
    sinks, slopes = torch.randn(4), torch.rand(4)
    first_valid = torch.tensor([3, 9])
    mask = torch.rand(2, 1, 3, 90) < 0.7
    queries = [
        torch.randn(2, 4, 3, 64),
        torch.randn(2, 3, 4, 64).transpose(1, 2),
        torch.randn(2, 3, 4, 70).transpose(1, 2)[..., 3:67],
        torch.randn(2, 4, 1, 64),
        torch.randn(2, 8, 3, 64),
        torch.randn(2, 8, 3, 64)[:, :4],
        torch.randn(2, 4, 3, 64)[:, :, :2],
        torch.randn(64, 2, 3, 4).permute(1, 3, 2, 0),
    ]
    several = [
        plain,
        AttentionParams(0.2),
        AttentionParams(0.1, causal=True),
        AttentionParams(0.1, window=5),
        AttentionParams(0.1, softcap=3.0),
        AttentionParams(0.1, sinks=sinks),
        AttentionParams(0.1, sinks=sinks.clone() + 1),
        AttentionParams(0.1, slopes=slopes),
        AttentionParams(0.1, first_valid=first_valid),
        AttentionParams(0.1, mask=mask),
    ]
    r = random.Random(0)
    query, params = queries[0], plain
    for _ in range(400):
        # One thing changes at a time, or nothing.
        if r.random() < 0.3:
            query = r.choice(queries)
        if r.random() < 0.5:
            params = r.choice(several)
        heads, count = query.shape[1:3]
        if (heads == 8 and (params.sinks is not None or params.slopes is not None)) or (
            count != 3 and params.mask is mask
        ):
            continue
        options: dict[str, Any] = {}
        rows, answers = query, []
        if results == "packed":
            rows = query.transpose(1, 2).reshape(-1, heads, 64)
            middle = r.choice((count, count, 2 * count, 0, 1)) if params.mask is None else count
            options["cu_queries"] = r.choice((list, tuple))((0, middle, 2 * count))
        shape = (*rows.shape[:-1], 64)
        form, dtype = r.choice(("dense", "dense", "strided")), r.choice((torch.float32, torch.float32, torch.float16))
        lse_form = r.choice(("none", "dense", "dense", "strided"))
        for sequences in (used, paged.sequences()):
            if results == "given":
                options["out"] = empty(shape, form, dtype)
                options["lse"] = None if lse_form == "none" else empty(shape[:-1], lse_form, torch.float32)
            out = native.attend(paged.shape, rows, sequences, params, threads=1, **options)
            answers.append((out, options.get("lse")))
        (a, b), (c, d) = answers
        assert a.shape == shape
        assert torch.equal(a, c)
        if b is not None:
            assert torch.equal(b, d)


def empty(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> torch.Tensor:
    """Not initialised, but for NaN where a call that writes elsewhere would leave it."""
    if form == "dense":
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full((*shape[:-1], shape[-1] + 6), torch.nan, dtype=dtype)[..., 2:-4]


def test_a_mask_that_a_sequence_outgrows_is_refused(kernel: None) -> None:
    case = Case(Spec(group=2, lengths=(70,), block_size=16, seed=2))
    paged = Paged(case)
    sequences, params = paged.sequences(), AttentionParams(0.1, mask=torch.ones(1, 1, 1, 60, dtype=torch.bool))
    for length in (59, 60):
        sequences.set_length(length)
        native.attend(paged.shape, case.query, sequences, params, threads=1)
    sequences.set_length(61)
    with pytest.raises(KVTierError, match="mask"):
        native.attend(paged.shape, case.query, sequences, params, threads=1)
