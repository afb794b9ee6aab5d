"""Problems of attention through block tables: the memory of the blocks, the calls, and the tolerance of answers.

The numbers and the right answers are those of `problems`, which the tests of the host's kernel share.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from problems import NAN, TINY, UNIT, Case, Exact, Result, Spec, changed

from kvtier.kernels import paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

__all__ = ["Blocks", "attend", "broken", "changed", "excess", "params_on", "small_spec", "solved", "without_sinks"]

GAP = 192  # bytes of poison between blocks


def small_spec(number: int, dtype: torch.dtype, *, most_queries: int = 70) -> Spec:
    """The spec of that number: always the same; each combines a few unusual things, and is small."""
    r = random.Random(f"{number} {dtype} device")
    k_dim = r.choice((64, 64, 80, 96, 128, 33, 17, 16, 8, 1))
    queries = min(r.choice((1, 1, 1, 2, 3, 5, 8, 17, 33, 70)), most_queries)
    lengths = tuple(max(queries, round(2 ** r.uniform(0, 7.7))) for _ in range(r.choice((1, 1, 2, 3))))
    rare = r.random
    return Spec(
        dtype=dtype,
        kv_heads=r.choice((1, 1, 2, 3)) if queries < 8 else 1,
        group=r.choice((1, 2, 3, 4, 5, 8)) if queries < 16 else r.choice((1, 2, 3)),
        queries=queries,
        k_dim=k_dim,
        v_dim=k_dim if rare() < 0.7 else r.choice((64, 128, 80, 17, 1)),
        block_size=r.choice((1, 3, 7, 16, 24, 64, 256)),
        lengths=lengths,
        first_valid=tuple(r.randint(0, n) for n in lengths) if rare() < 0.25 else None,
        causal=rare() < (0.8 if queries > 1 else 0.3),
        window=r.choice((1, 2, 5, 31, 64, 65, 5000)) if rare() < 0.35 else 0,
        softcap=r.choice((0.5, 5.0, 30.0)) if rare() < 0.2 else 0.0,
        sinks=rare() < 0.25,
        slopes=rare() < 0.2,
        mask=r.choice((torch.bool, torch.float32, torch.bfloat16, torch.float16)) if rare() < 0.35 else None,
        shared=(rare() < 0.5, rare() < 0.5, rare() < 0.5),
        out_dtype=r.choice((dtype, torch.float32)),
        scattered=rare() < 0.4,
        sharpness=r.choice((0.0, 0.3, 1.0, 1.0, 3.0, 10.0)),
        seed=number,
    )


@functools.cache
def solved(spec: Spec) -> tuple[Case, list[Exact]]:
    case = Case(spec)
    return case, [case.exact(s) for s in range(len(spec.lengths))]


class Blocks:
    """A case's keys and values in blocks on the device, in random order, NaN between them and behind each sequence."""

    def __init__(self, case: Case, device: torch.device) -> None:
        spec = case.spec
        self.device = device
        self.layout = BlockLayout(spec.kv_heads, spec.kv_heads, spec.k_dim, spec.v_dim, spec.block_size, spec.dtype)
        self.counts = [-(-n // spec.block_size) for n in spec.lengths]
        step = self.layout.nbytes + GAP
        memory = torch.full(((sum(self.counts) + 1) * step,), NAN, dtype=torch.uint8)
        order = list(range(sum(self.counts)))
        random.Random(spec.seed).shuffle(order)
        offsets: list[list[int]] = []
        for keys, values, count in zip(case.keys, case.values, self.counts, strict=True):
            row = [order.pop() * step + GAP for _ in range(count)]
            for index, offset in enumerate(row):
                k, v = self.layout.split(memory[offset : offset + self.layout.nbytes])
                part = slice(index * spec.block_size, (index + 1) * spec.block_size)
                n = keys[:, part].shape[1]
                k[0, :, :n], v[0, :, :n] = keys[:, part], values[:, part]
            offsets.append(row)
        self.memory = memory.to(device)
        start = self.memory.data_ptr()
        assert start % 16 == 0
        self.addresses = [[start + offset for offset in row] for row in offsets]
        self.nowhere = start + sum(self.counts) * step  # poison
        self.lengths = torch.tensor(spec.lengths, device=device)

    def table(self, chosen: Sequence[Sequence[int]] | None = None) -> AddressTable:
        """All blocks, or of each sequence those with the chosen indices; what does not count names poison."""
        indices = [range(count) for count in self.counts] if chosen is None else chosen
        width = max(map(len, indices)) + 2
        rows = [
            [row[i] for i in some] + [self.nowhere] * (width - len(some))
            for row, some in zip(self.addresses, indices, strict=True)
        ]
        where = [[*some] + [0] * (width - len(some)) for some in indices]
        return AddressTable(
            torch.tensor(rows, dtype=torch.int64, device=self.device),
            torch.tensor([len(some) for some in indices], dtype=torch.int32, device=self.device),
            None if chosen is None else torch.tensor(where, dtype=torch.int32, device=self.device),
        )


def params_on(params: AttentionParams, device: torch.device) -> AttentionParams:
    names = ("mask", "first_valid", "sinks", "slopes")
    return replace(params, **{n: x.to(device) for n in names if (x := getattr(params, n)) is not None})


def without_sinks(params: AttentionParams) -> AttentionParams:
    return replace(params, sinks=None)


def attend(case: Case, device: torch.device, call: Callable[..., Any] = paged.attend, **options: Any) -> Result:
    """The case on the device, into a result with a guard round about it; back on the host."""
    blocks = options.pop("blocks", None) or Blocks(case, device)
    with torch.device(device):
        result = Result(case.spec)
    query = case.query.to(device) if device.type == "cuda" else case.query
    call(
        query,
        options.pop("table", None) or blocks.table(),
        blocks.layout,
        blocks.lengths,
        params_on(options.pop("params", case.params), device),
        out=result.out,
        lse=result.lse,
        **options,
    )
    for name in ("out", "lse", "around", "_lse"):
        setattr(result, name, getattr(result, name).cpu())
    return result


def excess(case: Case, s: int, exact: Exact, out: torch.Tensor, lse: torch.Tensor) -> str:
    """What of the result for the last queries of sequence `s` exceeds the tolerance; empty if nothing does.

    out `[heads, queries, v_dim]`, lse `[heads, queries]`. The tolerance is that of the host's kernel (`problems`), but
    weights are rounded to the dtype in fp16 too, as tensor cores want them: an error of at most twice torch's plus the
    rounding of scores, weights, sums and the result; and, whatever torch does, at most what roundings add up to.
    """
    spec, u = case.spec, UNIT[torch.float32]
    last = slice(exact.out.shape[1] - out.shape[1], None)
    right, size = exact.out[:, last], exact.size[:, last]
    blur, step, right_lse = exact.blur[:, last], exact.step[:, last], exact.lse[:, last]
    blind = right_lse == -torch.inf
    if not torch.equal(lse[blind], right_lse[blind]) or bool(out[blind].count_nonzero()):
        return "a query that sees nothing gets more than 0 and -inf"
    error = (out.double() - right).abs()
    if bool(error.isnan().any()) or bool(lse.isnan().any()):
        return "NaN"
    rounding = UNIT[out.dtype] * right.abs() + TINY[out.dtype]
    theirs = (exact.theirs[:, last].to(out.dtype).double() - right).abs()[~blind]
    # A weight of fp16 below its smallest number is lost.
    weight = 0.0 if spec.dtype == torch.float32 else UNIT[spec.dtype]
    lost = 2.0**-24 * spec.lengths[s] ** 0.5 * 4 if spec.dtype == torch.float16 else 0.0
    floor = rounding + (2 * step + 4 * u + weight) * size + lost
    if theirs.numel() and float(error.max()) > 2 * float(theirs.max()) + float(floor.max()):
        return f"error {float(error.max()):.3g}, torch's is {float(theirs.max()):.3g}"
    allowed = rounding + (weight + 2 * blur + (16 + 2 * spec.lengths[s] ** 0.5) * u) * size + lost
    if bool((error > allowed).any()):
        return f"error {float((error / allowed).max()):.3g} times what rounding explains"
    difference = (lse - right_lse).abs()[~blind]
    allowed = (1e-6 + blur.squeeze(-1) + 1e-6 * right_lse.abs())[~blind]
    if bool((difference > allowed).any()):
        return f"lse is off by {float(difference.max()):.3g}"
    return ""


def broken(case: Case, exact: list[Exact], result: Result) -> list[str]:
    """What of a result exceeds the tolerance, and of which case."""
    found = [excess(case, s, e, result.out[s], result.lse[s]) for s, e in enumerate(exact)]
    if result.touched_outside():
        found.append("wrote outside its results")
    return [f"{what}: {case.spec}" for what in found if what]
