"""Sequences of any lengths whose blocks are where a test wants them, each brought there by the memory's own operations.

The numbers and the right answers are those of `problems`, which the tests of the kernels share.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from paged_problems import excess, small_spec
from problems import Case, Exact, Packed, Spec

from kvtier.attention import split
from kvtier.attention.call import release_threads
from kvtier.attention.reader import LayerReader
from kvtier.config import MemoryOptions
from kvtier.kernels.params import AttentionParams
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import Run, State
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.tiered import EngineFactory, TieredMemory
from kvtier.planning.policy import Policy
from kvtier.tables import writing
from kvtier.tables.layer import LayerKV
from kvtier.tables.table import BlockTable
from kvtier.testing import with_doubles

#: What a block is drawn to be: in both tiers, on its way to one of them, or in one alone.
PLACES = (State.DEVICE, State.LEAVING, State.BOTH, State.ARRIVING, State.HOST)


def ragged_spec(number: int, dtype: torch.dtype) -> tuple[Spec, list[int]]:
    """A batch of sequences, always the same for a number, and how many queries each has; at least one has some."""
    r = random.Random(f"{number} {dtype} ragged")
    spec = small_spec(number, dtype, most_queries=9)
    rows = r.randint(1, 4)
    counts = [r.choice((0, 1, 1, 2, 5, 9)) for _ in range(rows)]
    counts[r.randrange(rows)] = r.choice((1, 4, 11))
    most = max(counts)
    lengths = tuple(most + round(2 ** r.uniform(0, 6)) for _ in range(rows))
    return replace(
        spec,
        lengths=lengths,
        queries=most,
        kv_heads=r.choice((1, 2)),
        group=min(spec.group, 4),
        block_size=r.choice((1, 3, 7, 16)),
        first_valid=tuple(r.randint(0, n) for n in lengths) if r.random() < 0.3 else None,
        mask=r.choice((torch.bool, torch.float32, dtype)) if r.random() < 0.4 else None,
        shared=(r.random() < 0.3, r.random() < 0.5, r.random() < 0.3),
        sinks=r.random() < 0.4,
        causal=r.random() < 0.8,
        out_dtype=dtype,
        scattered=False,
    ), counts


class Sequences:
    """The sequences of a case as block tables, in two tiers or on the host alone.

    Args:
        case: its keys and values; where two rows share a table's beginning, they are changed to be equal there.
        seed: of chunks, forks and places.
        device: that attends.
        engine: moves blocks; None: the device's own.
        two_tiers: whether there is a device tier.
    """

    def __init__(
        self,
        case: Case,
        seed: int,
        *,
        device: torch.device,
        engine: EngineFactory | None = None,
        two_tiers: bool = True,
    ) -> None:
        self.case, self.random = case, random.Random(seed)
        spec = case.spec
        layout = BlockLayout(spec.kv_heads, spec.kv_heads, spec.k_dim, spec.v_dim, spec.block_size, spec.dtype)
        blocks = sum(-(-n // spec.block_size) + 2 for n in spec.lengths)
        budget = (4 * blocks + 20) * layout.nbytes
        options = MemoryOptions.parse(budget if two_tiers else None, budget + 2**20)
        self.memory = TieredMemory.of_one_cache(options, Policy(write_through=1.0))
        self.memory.private = False  # slots that are read are held
        if engine is not None:
            with_doubles(self.memory, engine)
        self.owner = self.memory.join()
        self.random_tokens = torch.Generator().manual_seed(seed)
        with self.memory.lock:
            self.device = self.memory.on(device)
            self.blocks = self.memory.block_set(self.owner, self.device, layout, 0)
            self.layer = LayerKV(0, layout, self.device, self.blocks, self.owner.counters)
            self.tables: list[BlockTable] = []
            self._tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
            for row in range(len(spec.lengths)):
                self.tables.append(self._write(row))
            self._write_the_rest_packed()
            self.layer._set_rows(self.tables)
            self.layer.length = max(table.length for table in self.tables)
        self.reader = LayerReader(self.layer, self.memory, self.owner, host_attention=True)

    def _write(self, row: int) -> BlockTable:
        """A table with the first tokens of a row, in chunks; now and then a fork of an earlier table."""
        case, r = self.case, self.random
        keys, values = case.keys[row], case.values[row]
        extra = r.choice((0, 0, 1, 2 * case.spec.block_size))
        table = BlockTable()
        if row and r.random() < 0.4:
            other = r.randrange(row)
            common = r.randint(1, min(keys.shape[1], case.keys[other].shape[1], self.tables[other].length))
            table = self.tables[other].fork()
            table.crop(common, case.spec.block_size, self.device.free)
            keys[:, :common], values[:, :common] = (x[other][:, :common] for x in (case.keys, case.values))
        more = [torch.randn(x.shape[0], extra, x.shape[2], generator=self.random_tokens) for x in (keys, values)]
        both = zip((keys, values), more, strict=True)
        keys, values = (torch.cat([x, y.to(x.dtype)], 1).to(self.device.device) for x, y in both)
        first = r.choice((keys.shape[1], r.randint(1, keys.shape[1])))
        while table.length < first:
            span = slice(table.length, table.length + r.choice((1, 2, case.spec.block_size, 100)))
            writing.append(self.device, self.blocks, table, keys[:, span], values[:, span])
        self._tokens.append((keys, values))
        return table

    def _write_the_rest_packed(self) -> None:
        """Tokens of all rows end to end, as an engine appends them, until each table has its own and some more."""
        while True:
            left = [x.shape[1] - table.length for (x, _), table in zip(self._tokens, self.tables, strict=True)]
            if not any(left):
                return
            counts = [min(n, self.random.choice((0, 1, 2, self.case.spec.block_size + 1))) for n in left]
            spans = [slice(table.length, table.length + n) for table, n in zip(self.tables, counts, strict=True)]
            packed = [
                torch.cat([kv[which][:, span] for kv, span in zip(self._tokens, spans, strict=True)], 1)[None]
                for which in (0, 1)
            ]
            cu_tokens = [0, *itertools.accumulate(counts)]
            writing.append_packed(self.device, self.blocks, self.tables, packed[0], packed[1], cu_tokens)

    # Places

    def singles(self) -> Iterator[Run]:
        """Every sealed block, cut out as a run of its own."""
        for run in list(self.blocks.runs):
            rest: Run | None = run if run.sealed else None
            while rest is not None:
                first, rest = residency.cut(rest, 1) if rest.count > 1 else (rest, None)
                yield first

    def scatter(self, places: Sequence[State] = PLACES) -> None:
        """Draw a place for each sealed block, and bring it there."""
        with self.memory.lock:
            drawn = [(run, self.random.choice(places)) for run in self.singles()]
            for run, place in drawn:
                self.bring(run, place)
            for table in self.tables:
                table.resolve()

    def bring(self, run: Run, place: State) -> None:
        """Bring one sealed block from where it is to a place, by what the memory itself calls."""
        device, pools = self.device, self.blocks.pools
        if run.state in (State.HOST, State.ARRIVING) and place not in (State.HOST, State.ARRIVING):
            if run.state is State.HOST:
                assert device.fetch([run], 1, None, evict=False) == [run]
            residency.arrive(run)
        if place is State.DEVICE:
            if run.state is State.LEAVING:
                assert run.move is not None
                assert run.move.transfer is not None
                run.move.transfer.synchronize()
            if run.state is State.BOTH:
                residency.drop_copy(run)
        elif place in (State.LEAVING, State.BOTH):
            if run.state is State.DEVICE:
                found = device.host.take(pools.host, 1, None, required=True)
                assert found is not None
                residency.write_back([(run, found[0])])
            if place is State.BOTH and run.state is State.LEAVING:
                assert run.move is not None
                assert run.move.transfer is not None
                run.move.transfer.synchronize()
        else:
            if run.state is State.ARRIVING and place is State.HOST:
                residency.evict(run, None)  # nobody wants it any more
            elif run.state is not State.ARRIVING:
                device.evict_run(run)
            if place is State.ARRIVING and run.state is State.HOST:
                assert device.fetch([run], 1, None, evict=False) == [run]

    def states(self) -> dict[State, int]:
        """Blocks by state."""
        return {state: n for state in State if (n := self.blocks.counts[state])}

    # Attention

    def attend(self, counts: list[int], *, four: bool = True) -> list[str]:
        """Attend with so many queries of each sequence, end to end; what is wrong, row by row.

        Args:
            four: in the form that models have, `[1, heads, total, ...]`; else `[total, heads, ...]`.
        """
        case, packed, device = self.case, Packed(self.case, counts, four=four), self.device.device
        out = split.attend(
            self.reader,
            case.spec.lengths,
            packed.query.to(device),
            _on(packed.params, device),
            cu_queries=packed.cu_queries,
        ).cpu()
        if four:
            out = out[0].transpose(0, 1)
        assert out.shape == (sum(counts), case.spec.heads, case.spec.v_dim)
        assert out.dtype is case.spec.dtype
        found = []
        for row in range(len(counts)):
            exact = self.exact(row)
            part = out[packed.cu_queries[row] : packed.cu_queries[row + 1]].transpose(0, 1)
            last = slice(exact.lse.shape[1] - part.shape[1], None)
            if what := excess(case, row, exact, part, exact.lse[:, last].float()):
                found.append(f"{what}: row {row} with {counts[row]} queries, {self.states()}, {case.spec}")
        return found

    def exact(self, row: int) -> Exact:
        """The dense answer for one row in float64."""
        return self.case.exact(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees, references of tables included."""
        self.memory.check_integrity()
        refs: dict[Run, int] = {}
        for table in self.tables:
            assert table.blocks == -(-table.length // self.layer.layout.block_size)
            for run in table.resolve():
                refs[run] = refs.get(run, 0) + 1
        assert refs == {run: run.refs for run in self.blocks.runs}

    def close(self) -> None:
        """Give everything back: nothing is left, not even of what was on its way."""
        with self.memory.lock:
            for table in self.tables:
                table.clear(self.device.free)
            release_threads(self.owner)
            self.memory.drop_set(self.owner, self.device, self.blocks)
            self.memory.leave(self.owner)
        self.memory.close()


def _on(params: AttentionParams, device: torch.device) -> AttentionParams:
    names = ("mask", "first_valid", "sinks", "slopes")
    moved: dict[str, Any] = {n: x.to(device) for n in names if (x := getattr(params, n)) is not None}
    return replace(params, **moved)
