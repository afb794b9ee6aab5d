"""Any partition of the blocks among parts (device, arriving, host), attended apart and merged, is the dense answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from paged_problems import Blocks, excess, params_on, small_spec, solved, without_sinks
from problems import DTYPES, Case, Spec

from kvtier.kernels import paged, tables
from kvtier.kernels.params import AttentionParams

# The interpreter is numpy, which warns of what is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = 10  # random problems of each dtype: the interpreter is slow
PARTS = ("device", "arriving", "host")


def ragged_spec(number: int, dtype: torch.dtype) -> tuple[Spec, list[int]]:
    """A batch of sequences, and how many queries each has: from none to more than a tile holds."""
    r = random.Random(f"{number} {dtype} partition")
    spec = small_spec(number, dtype, most_queries=9)
    rows = r.randint(1, 4)
    counts = [r.choice((0, 1, 1, 2, 5, 9)) for _ in range(rows)]
    counts[r.randrange(rows)] = r.choice((1, 4, 18))
    most = max(counts)
    lengths = tuple(most + round(2 ** r.uniform(0, 6.5)) for _ in range(rows))
    return replace(
        spec,
        lengths=lengths,
        queries=most,
        kv_heads=1,
        group=min(spec.group, 4),
        first_valid=tuple(r.randint(0, n) for n in lengths) if r.random() < 0.3 else None,
        # Rows have masks of their own, for each query from the row's first on; or one for all queries of a row.
        mask=r.choice((torch.bool, torch.float32, dtype)) if r.random() < 0.5 else None,
        shared=(False, r.random() < 0.5, r.random() < 0.3),
        sinks=r.random() < 0.4,
        causal=r.random() < 0.8,
    ), counts


def packed(case: Case, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, AttentionParams]:
    """The last queries of each sequence one after the other, where they begin and end, and params with masks moved."""
    query = torch.cat([q[:, q.shape[1] - n :] for q, n in zip(case.query, counts, strict=True)], 1).transpose(0, 1)
    ends = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
    params = case.params
    if params.mask is not None and params.mask.shape[2] > 1:
        moved = [x.roll(n, 1) for x, n in zip(params.mask, counts, strict=True)]
        params = replace(params, mask=torch.stack(moved))
    return query, ends, params


@pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=pytest.mark.slow) if x != torch.bfloat16 else x for x in DTYPES], ids=str
)
def test_any_partition_of_ragged_sequences_merges_to_the_dense_answer(dtype: torch.dtype, device: torch.device) -> None:
    found = []
    for number in range(CASES):
        spec, counts = ragged_spec(number, dtype)
        case, exact = solved(spec)
        blocks, r = Blocks(case, device), random.Random(number)
        query, ends, params = packed(case, counts)
        # Parts may hold nothing of a row, of any row, or all there is.
        weights = r.choice(((1, 1, 1), (5, 1, 1), (1, 0, 3), (0, 0, 1)))
        where = [r.choices(PARTS, weights, k=n) for n in blocks.counts]
        with_sinks = r.choice(PARTS)
        parts = []
        for name in PARTS:
            chosen = [[i for i, part in enumerate(row) if part == name] for row in where]
            own = params_on(params if name == with_sinks else without_sinks(params), device)
            given = (query.to(device), blocks.table(chosen))
            told = {
                "cu_queries": ends.to(device),
                "max_queries": max(counts) if spec.mask else r.choice((None, max(counts))),
            }
            if name == "host":
                parts.append(tables.attend(*given, blocks.layout, blocks.lengths, own, **told))
            elif name == "arriving":
                parts.append(paged.Prepared(blocks.layout)(*given, blocks.lengths, own, **told))
            else:
                parts.append(paged.attend(*given, blocks.layout, blocks.lengths, own, parts=1 + number % 2, **told))
        out, lse = (x.cpu() for x in paged.merge(parts))
        assert out.shape == (sum(counts), spec.heads, spec.v_dim)
        for s, e in enumerate(exact):
            span = slice(int(ends[s]), int(ends[s + 1]))
            what = excess(case, s, e, out[span].transpose(0, 1), lse[span].T)
            found.append(f"{what}: {spec}, row {s} with {counts[s]} queries, {where[s]}" if what else "")
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_partition_of_a_batch_merges_to_the_dense_answer_in_the_models_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    """As a layer does it: `[rows, heads, queries, dim]`, one length for all rows, and the result in the dtype."""
    found = []
    for number in range(CASES // 3):
        spec = small_spec(100 + number, dtype, most_queries=8)
        length = max(spec.lengths)
        valid = tuple(min(x, length) for x in spec.first_valid) if spec.first_valid else None
        spec = replace(spec, lengths=(length,) * len(spec.lengths), first_valid=valid, out_dtype=dtype)
        case, exact = solved(spec)
        blocks, r = Blocks(case, device), random.Random(number)
        where = [r.choices(PARTS, k=n) for n in blocks.counts]
        attend = paged.Prepared(blocks.layout)
        parts = []
        for name in PARTS:
            chosen = [[i for i, part in enumerate(row) if part == name] for row in where]
            own = params_on(case.params if name == "host" else without_sinks(case.params), device)
            parts.append(attend(case.query.to(device), blocks.table(chosen), length, own))
        out, lse = (x.cpu() for x in paged.merge(parts, dtype=dtype))
        assert out.dtype == dtype
        found += [f"{w}: {spec}" for s, e in enumerate(exact) if (w := excess(case, s, e, out[s], lse[s]))]
    assert not found, "\n".join(found)
