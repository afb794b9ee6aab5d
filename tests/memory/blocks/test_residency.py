"""The transition table: what it allows happens and is accounted for, what it does not allow changes nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch

from kvtier.errors import TransferError
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import RESIDENT, BlockSet, Pools, Run, State
from kvtier.memory.blocks.residency import ONE_TIER, TWO_TIERS, Operation
from kvtier.memory.integrity import check_set
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.stats import Counters
from kvtier.tables.table import BlockTable
from kvtier.transfer.doubles import FailingTransfers, HeldTransfers
from kvtier.transfer.engine import InlineTransfers, Transfer, TransferEngine
from kvtier.transfer.engine import State as TransferState

LAYOUT = BlockLayout(1, 1, 4, 4, 2, torch.float32)
CPU = torch.device("cpu")
SLOTS, COUNT = 12, 3


class World:
    """A set of blocks over small pools, and ways to bring a run into any state."""

    def __init__(self, *, two_tiers: bool = True, engine: TransferEngine | None = None) -> None:
        pools = [BlockPool(LAYOUT, SlabAllocator(CPU, Budget(t, SLOTS * LAYOUT.nbytes))) for t in ("device", "host")]
        for pool in pools:
            pool.grow(SLOTS)
        self.engine = engine or HeldTransfers(CPU, eagerness=0.0)
        self.pools = Pools(LAYOUT, pools[0] if two_tiers else None, pools[1], self.engine)
        self.blocks = BlockSet(0, 0, self.pools, Counters())

    def take(self, pool: BlockPool | None, count: int = COUNT) -> int:
        assert pool is not None
        found = pool.take(count)
        assert found is not None
        assert found[1] == count
        return found[0]

    def run(self, state: State) -> Run:
        """A run in that state, its first byte its number."""
        run = residency.allocate(self.blocks, self.take(self.pools.home), COUNT)
        self.pools.home.bytes(run.home, COUNT).fill_(len(self.blocks.runs))
        path: dict[State, tuple[Operation, ...]] = {
            State.FREE: (Operation.FREE,),
            State.FILLING: (),
            State.DEVICE: (Operation.SEAL,),
            State.LEAVING: (Operation.SEAL, Operation.WRITE_BACK),
            State.BOTH: (Operation.SEAL, Operation.WRITE_BACK, Operation.COMPLETE),
            State.HOST: (Operation.SEAL, Operation.WRITE_BACK, Operation.COMPLETE, Operation.EVICT),
            State.ARRIVING: (
                Operation.SEAL,
                Operation.WRITE_BACK,
                Operation.COMPLETE,
                Operation.EVICT,
                Operation.FETCH,
            ),
        }
        if self.pools.device is None and state is State.HOST:
            path[State.HOST] = (Operation.SEAL,)
        for operation in path[state]:
            if operation is not Operation.COMPLETE or run.move is not None:  # inline copies are complete at once
                self.do(operation, run)
        assert run.state is state
        return run

    def do(self, operation: Operation, run: Run) -> None:
        """Carry out an operation as the memory does."""
        device, host = self.pools.device, self.pools.host
        acts: dict[Operation, Callable[[], object]] = {
            Operation.SEAL: lambda: residency.seal(run),
            Operation.REOPEN: lambda: residency.reopen(run),
            Operation.WRITE_BACK: lambda: residency.write_back([(run, self.take(host))]),
            Operation.FETCH: lambda: residency.fetch([(run, self.take(device))]),
            Operation.COMPLETE: lambda: self._transfer(run).synchronize(),
            Operation.FAIL: lambda: self._transfer(run).settle(RuntimeError("made to fail")),
            Operation.EVICT: lambda: residency.evict(run, None),
            Operation.DROP_COPY: lambda: residency.drop_copy(run),
            Operation.MOVE: lambda: self._move(run),
            Operation.FREE: lambda: residency.free(run, None),
        }
        acts[operation]()

    def _transfer(self, run: Run) -> Transfer:
        assert run.move is not None
        assert run.move.transfer is not None
        return run.move.transfer

    def _move(self, run: Run) -> None:
        pool = self.pools.host if run.device is None else self.pools.device
        assert pool is not None
        pool.give(*residency.move(run, pool, self.take(pool)))

    def facts(self, run: Run) -> tuple[object, ...]:
        """Everything that an operation could change."""
        b = self.blocks
        pools = [p for p in (self.pools.device, self.pools.host) if p is not None]
        return (
            (run.state, run.device, run.host, run.move, run.count),
            (list(b.counts), list(b.runs), list(b.resident), list(b.dirty), b.version),
            [(p.free, p.held, p.used) for p in pools],
        )

    def check(self) -> None:
        """Slots, lists and counts agree."""
        check_set(self.blocks)
        for pool in (self.pools.device, self.pools.host):
            if pool is not None:
                pool.check_integrity()
        self.engine.drain()
        for pool, name in ((self.pools.device, "device"), (self.pools.host, "host")):
            if pool is not None:
                pool.poll()
                assert pool.used == sum(r.count for r in self.blocks.runs if getattr(r, name) is not None)


#: The table once more, by hand: an edge that is added or left out there is noticed here.
EDGES = {
    "allocate": "FREE>FILLING",
    "seal": "FILLING>DEVICE",
    "reopen": "DEVICE>FILLING",
    "write_back": "DEVICE>LEAVING",
    "fetch": "HOST>ARRIVING",
    "complete": "LEAVING>BOTH ARRIVING>BOTH",
    "fail": "LEAVING>DEVICE ARRIVING>HOST",
    "evict": "BOTH>HOST ARRIVING>HOST",
    "drop_copy": "BOTH>DEVICE",
    "move": "FILLING>FILLING DEVICE>DEVICE BOTH>BOTH HOST>HOST",
    "free": "FILLING>FREE DEVICE>FREE LEAVING>FREE BOTH>FREE ARRIVING>FREE HOST>FREE",
}
HOST_EDGES = {
    "allocate": "FREE>FILLING",
    "seal": "FILLING>HOST",
    "reopen": "HOST>FILLING",
    "move": "FILLING>FILLING HOST>HOST",
    "free": "FILLING>FREE HOST>FREE",
}


@pytest.mark.parametrize(("table", "edges"), [(TWO_TIERS, EDGES), (ONE_TIER, HOST_EDGES)], ids=["two tiers", "one"])
def test_the_table_has_these_edges_and_no_others(
    table: dict[Operation, dict[State, State]], edges: dict[str, str]
) -> None:
    found = {o.value: {f"{before.name}>{after.name}" for before, after in moves.items()} for o, moves in table.items()}
    assert found == {name: set(text.split()) for name, text in edges.items()}


PAIRS = [pytest.param(o, s, id=f"{o.value}-{s.name}") for o, s in itertools.product(Operation, State)]


@pytest.mark.parametrize(("operation", "state"), [p for p in PAIRS if p.values[0] is not Operation.ALLOCATE])
def test_with_a_device_tier_the_table_says_what_may_happen_to_a_run(operation: Operation, state: State) -> None:
    world = World()
    run = world.run(state)
    after = TWO_TIERS[operation].get(state)
    # Opening waits for a copy under way, and gives a host copy up; so does nothing else.
    if operation is Operation.REOPEN and state in (State.LEAVING, State.ARRIVING, State.BOTH):
        after = State.FILLING
    if after is None:
        before = world.facts(run)
        with pytest.raises(AssertionError):
            world.do(operation, run)
        # Slots that the caller took for it are the caller's to give back.
        assert world.facts(run)[:2] == before[:2]
        return
    content = None if state in (State.FREE, State.ARRIVING) else first_byte(world, run)
    world.do(operation, run)
    assert run.state is after
    if after is not State.FREE and content is not None:
        world.engine.drain()
        assert first_byte(world, run) == content, "the blocks hold what they held"
    world.check()


@pytest.mark.parametrize(
    ("operation", "state"),
    [(o, s) for o in (*ONE_TIER, Operation.EVICT) for s in (State.FREE, State.FILLING, State.HOST)],
)
def test_without_one_blocks_begin_and_stay_on_the_host(operation: Operation, state: State) -> None:
    if operation is Operation.ALLOCATE:
        return
    world = World(two_tiers=False)
    run = world.run(state)
    after = ONE_TIER.get(operation, {}).get(state)
    if after is None:
        before = world.facts(run)
        with pytest.raises((AssertionError, KeyError)):
            world.do(operation, run)
        assert world.facts(run)[:2] == before[:2]
        return
    content = None if state is State.FREE else first_byte(world, run)
    world.do(operation, run)
    assert run.state is after
    assert after is State.FREE or first_byte(world, run) == content
    world.check()


def first_byte(world: World, run: Run) -> int:
    """Of the blocks, wherever they are valid."""
    on_device = run.device is not None and run.state in (*RESIDENT, State.FILLING)
    pool, slot = (world.pools.device, run.device) if on_device else (world.pools.host, run.host)
    assert pool is not None
    assert slot is not None
    content = pool.bytes(slot, run.count)
    assert len(content.unique()) == 1
    return int(content[0])


def test_every_state_can_be_reached_and_left() -> None:
    for table in (TWO_TIERS, ONE_TIER):
        states = {State.FREE} | {after for moves in table.values() for after in moves.values()}
        assert states == {before for moves in table.values() for before in moves}
    assert {after for moves in TWO_TIERS.values() for after in moves.values()} == set(State)


@pytest.mark.parametrize("state", [State.LEAVING, State.ARRIVING, State.BOTH, State.HOST, State.DEVICE])
@pytest.mark.parametrize("at", range(1, COUNT))
def test_a_run_may_be_cut_in_any_state_and_both_parts_go_their_way(state: State, at: int) -> None:
    world = World()
    run = world.run(state)
    content = None if state is State.ARRIVING else first_byte(world, run)
    left, right = residency.cut(run, at)
    assert (left.count, right.count) == (at, COUNT - at)
    assert run.parts == (left, right)
    assert list(run.leaves()) == [left, right]
    world.engine.drain()
    for part in (left, right):
        assert part.state is (State.BOTH if state in (State.LEAVING, State.ARRIVING) else state)
        assert content is None or first_byte(world, part) == content
    world.check()
    if left.state is State.BOTH:
        residency.evict(left, None)
        assert (left.state, right.state) == (State.HOST, State.BOTH)
        world.check()


def test_a_table_that_nobody_reads_while_its_run_is_cut_thousands_of_times_has_all_parts_in_order() -> None:
    """As an idle cache's whose blocks leave the device a few at a time, for another cache of the memory."""
    count = 2 * sys.getrecursionlimit()
    pool = BlockPool(LAYOUT, SlabAllocator(CPU, Budget("host", count * LAYOUT.nbytes)))
    pool.grow(count)
    blocks = BlockSet(0, 0, Pools(LAYOUT, None, pool, InlineTransfers(CPU)), Counters())
    start, found = pool.take(count) or (0, 0)
    assert found == count
    rest = residency.allocate(blocks, start, count)
    table = BlockTable(count * LAYOUT.block_size, [rest])
    residency.seal(rest)
    for i in range(count - 1):  # from either end
        left, right = residency.cut(rest, 1 if i % 2 else rest.count - 1)
        rest = right if i % 2 else left
    assert [run.host for run in table.resolve()] == list(range(start, start + count))


@pytest.mark.parametrize("state", [State.DEVICE, State.BOTH, State.HOST])
def test_what_was_cut_can_be_joined_again_and_nothing_else_can(state: State) -> None:
    world = World()
    left, right = residency.cut(world.run(state), 1)
    other = world.run(state)
    assert residency.can_join(left, right)
    assert not residency.can_join(right, left)
    assert not residency.can_join(left, other), "not neighbours"
    right.refs = 2
    assert not residency.can_join(left, right), "another table holds only one of them"
    right.refs = 1
    residency.join(left, right)
    assert left.count == COUNT
    world.check()


@pytest.mark.parametrize("operation", [Operation.WRITE_BACK, Operation.FETCH])
def test_a_copy_that_fails_at_once_leaves_its_source_and_gives_its_slots_back(operation: Operation) -> None:
    failing = False
    world = World(engine=FailingTransfers(CPU, lambda transfer: failing))
    run = world.run(State.DEVICE if operation is Operation.WRITE_BACK else State.BOTH)
    if operation is Operation.FETCH:
        residency.evict(run, None)
    before, content = run.state, first_byte(world, run)
    failing = True
    world.do(operation, run)
    assert run.state is before
    assert first_byte(world, run) == content
    assert run.move is None
    world.check()


def test_slots_of_a_fetch_that_nobody_wants_any_more_are_held_until_it_ends() -> None:
    world = World()
    run = world.run(State.ARRIVING)
    device = world.pools.device
    assert device is not None
    slots = range(run.device or 0, (run.device or 0) + COUNT)
    residency.evict(run, None)
    assert device.held == COUNT
    taken: set[int] = set()
    while (found := device.take(SLOTS)) is not None:
        taken |= set(range(found[0], found[0] + found[1]))
    assert not taken & set(slots), "a slot was handed out while a copy still wrote to it"
    world.engine.drain()
    device.poll()
    assert device.held == 0
    assert device.free == COUNT


def test_a_fetch_that_the_compute_stream_waits_for_has_arrived_and_still_reads_the_host_slots() -> None:
    world = World(engine=HeldTransfers(CPU, eagerness=0.0, late=True))
    run = world.run(State.ARRIVING)
    residency.arrive(run)
    assert run.state is State.BOTH
    assert not residency.can_move(run), "the copy has not settled"
    residency.drop_copy(run)
    assert world.pools.host.held == COUNT, "the copy has not settled"
    world.engine.poll()
    world.pools.host.poll()
    assert world.pools.host.held == 0
    world.check()


def test_a_failed_fetch_is_told_to_who_waits_and_may_be_tried_again() -> None:
    world = World()
    run = world.run(State.ARRIVING)
    transfer = run.move.transfer if run.move else None
    assert transfer is not None
    transfer.settle(RuntimeError("made to fail"))
    assert run.state is State.HOST
    with pytest.raises(TransferError, match="made to fail"):
        transfer.wait()
    assert transfer.state is TransferState.FAILED
    world.do(Operation.FETCH, run)
    residency.arrive(run)
    assert run.state is State.BOTH
    world.check()
