"""Any partition: wherever the blocks of ragged sequences are, split attention is the dense answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from behind import behind_the_cpus_back
from paged_problems import excess
from partitioned import PLACES, Sequences, ragged_spec
from problems import DTYPES, Case, Spec

from kvtier.attention import split
from kvtier.attention.host_part import HostPart
from kvtier.attention.partition import Partition
from kvtier.attention.reader import LayerReader
from kvtier.cpu import native
from kvtier.memory.blocks.block import State
from kvtier.memory.storage.buffers import IoBuffers
from kvtier.memory.tiered import EngineFactory, default_engine
from kvtier.testing import held
from kvtier.transfer.engine import Transfer, TransferEngine

pytestmark = pytest.mark.usefixtures("on_the_host")

CPU = torch.device("cpu")
CASES = 8  # random problems of each dtype and engine

ENGINES: dict[str, EngineFactory] = {
    "inline": default_engine,
    # Copies run when somebody waits for them, and settle then, or with `poll`, as on a stream.
    "held": held(1, eagerness=0.0),
    "late": held(2, eagerness=0.0, late=True),
    "behind the CPU's back": behind_the_cpus_back(held(3, eagerness=0.0, late=True)),
    "in any order": behind_the_cpus_back(held(4, eagerness=0.3)),
}


@pytest.fixture(params=["native", "plain"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native library, and without."""
    if request.param == "native" and not native.available():
        pytest.skip("the native library is not compiled")
    if request.param == "plain":
        monkeypatch.setattr(native, "available", lambda: False)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_any_partition_of_ragged_sequences_gives_the_dense_answer(
    engine: str, dtype: torch.dtype, library: str
) -> None:
    found: list[str] = []
    seen: set[State] = set()
    for number in range(CASES):
        spec, counts = ragged_spec(number, dtype)
        r = random.Random(number)
        sequences = Sequences(Case(spec), number, device=CPU, engine=ENGINES[engine])
        for turn in range(3):
            sequences.scatter(PLACES if r.random() < 0.7 else r.sample(PLACES, r.randint(1, 3)))
            seen |= sequences.states().keys()
            found += [f"turn {turn} of {number}: {what}" for what in sequences.attend(counts)]
            r.shuffle(counts)
            sequences.check_integrity()
        sequences.close()
    assert not found, "\n".join(found)
    # Without an engine that holds copies back, none is under way for long.
    sure = {*PLACES} - ({State.LEAVING, State.ARRIVING} if engine in ("inline", "in any order") else set())
    assert seen >= {*sure, State.FILLING}, "some state was never met"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_sequences_on_the_host_alone_give_the_dense_answer(dtype: torch.dtype, library: str) -> None:
    found: list[str] = []
    for number in range(CASES):
        spec, counts = ragged_spec(100 + number, dtype)
        sequences = Sequences(Case(spec), number, device=CPU, two_tiers=False)
        found += sequences.attend(counts, four=False)
        sequences.check_integrity()
        sequences.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("engine", ["inline", "behind the CPU's back"])
def test_any_partition_of_a_batch_of_one_length_gives_the_dense_answer(engine: str, library: str) -> None:
    """As a cache's layer asks: `[rows, heads, queries, dim]`, and a number for all lengths."""
    for number in range(CASES):
        dtype = DTYPES[number % len(DTYPES)]
        spec, _ = ragged_spec(200 + number, dtype)
        length = max(spec.lengths)
        # A mask for every row and query, or one for all; first valid tokens within every row.
        spec = replace(spec, lengths=(length,) * len(spec.lengths), first_valid=None if number % 2 else (1,) * 4)
        spec = replace(spec, first_valid=spec.first_valid and spec.first_valid[: len(spec.lengths)])
        sequences = Sequences(Case(spec), number, device=CPU, engine=ENGINES[engine])
        sequences.scatter()
        case = sequences.case
        out = split.attend(sequences.reader, length, case.query, case.params)
        for row in range(len(spec.lengths)):
            exact = case.exact(row)
            assert not excess(case, row, exact, out[row], exact.lse.float()), (row, spec)
        sequences.close()


def test_an_interrupt_while_a_query_waits_for_the_device_gives_its_buffer_back(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    def interrupted(part: HostPart) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(IoBuffers, "is_pageable", lambda buffers, buffer: True)
    monkeypatch.setattr(TransferEngine, "pageable_copies_block", True)
    monkeypatch.setattr(HostPart, "_come_by", interrupted)
    spec, _ = ragged_spec(200, DTYPES[0])
    length = max(spec.lengths)
    spec = replace(spec, lengths=(length,) * len(spec.lengths), first_valid=None)
    sequences = Sequences(Case(spec), 0, device=CPU, engine=ENGINES["behind the CPU's back"])
    sequences.scatter()
    assert sequences.reader.partition(length).host
    with pytest.raises(KeyboardInterrupt):
        split.attend(sequences.reader, length, sequences.case.query, sequences.case.params)
    assert not sequences.reader.io_buffers.in_use
    sequences.close()


def breaking(what: str, patch: pytest.MonkeyPatch) -> None:
    """Leave one thing out of split attention."""
    if what == "the wait for what is arriving":
        patch.setattr(split, "arrive", lambda reader, partition: None)
    elif what == "the version of the partition":
        made = LayerReader.partition

        def kept(self: LayerReader, lengths: int | Sequence[int]) -> Partition:
            return self._partition or made(self, lengths)

        patch.setattr(LayerReader, "partition", kept)
    elif what == "the wait for the query":
        patch.setattr(Transfer, "synchronize", lambda self: None)
    elif what == "that sinks count once":
        patch.setattr(split, "replace", lambda params, **changes: params)


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "the wait for what is arriving",
        "the version of the partition",
        "the wait for the query",
        "that sinks count once",
    ],
)
def test_what_is_left_out_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    found: list[str] = []
    for number in range(4):
        spec = Spec(lengths=(40, 23), queries=2, sinks=True, seed=number, k_dim=8, v_dim=8, block_size=4)
        sequences = Sequences(Case(spec), number, device=CPU, engine=ENGINES["behind the CPU's back"])
        sequences.scatter((State.DEVICE, State.ARRIVING, State.HOST))
        sequences.attend([2, 1])
        sequences.scatter((State.DEVICE, State.ARRIVING, State.HOST))
        with monkeypatch.context() as patch:
            breaking(what, patch)
            found += sequences.attend([1, 2])
        sequences.close()
    assert bool(found) is (what != "nothing")
