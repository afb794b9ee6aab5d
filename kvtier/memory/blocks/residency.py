"""The one place that moves a block: every change of a run's state or slots is one operation here.

    operation    from                      to                        bytes
    allocate     FREE                      FILLING                   none; the caller took the slots
    seal         FILLING                   DEVICE, or HOST (*)       none
    reopen       DEVICE, or HOST (*)       FILLING                   none; a copy under way is waited for, one on the
                                                                     host given up, first
    write_back   DEVICE                    LEAVING                   device -> host, in the background
    fetch        HOST                      ARRIVING                  host -> device, in the background
    complete     LEAVING, ARRIVING         BOTH                      the transfer ended, or the compute stream waits
    fail         LEAVING / ARRIVING        DEVICE / HOST             the transfer failed; its source is intact
    evict        BOTH, ARRIVING            HOST                      none
    drop_copy    BOTH                      DEVICE                    none; the host slots are given up
    move         FILLING, DEVICE, BOTH,    the same                  within one tier
                 HOST
    free         any but FREE              FREE                      none

    (*) where there is no device tier: blocks begin, and stay, on the host.

Operations that copy have two phases: *prepare* gives the run its target slots and submits the copies; the transfer then
calls *complete* or *fail*. Slots that a transfer or a reader may still use are held by the pool until then.

`cut`, `join` and `adopt` are no operations of the table: the blocks keep their state, and belong to other runs, or to
another set. `repair` makes states, slots and counts agree after a change was cut short.

A test enumerates the table. The caller holds the memory's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from kvtier.memory.access.change import undone
from kvtier.memory.access.readers import Fences
from kvtier.memory.blocks.block import RESIDENT, BlockSet, Move, Run, State
from kvtier.memory.storage.pool import BlockPool, Fence
from kvtier.stats import Counters
from kvtier.transfer.copies import Copy, joined
from kvtier.transfer.engine import Direction, Event, Transfer


class Operation(enum.Enum):
    """What can happen to a run."""

    ALLOCATE = "allocate"
    SEAL = "seal"
    REOPEN = "reopen"
    WRITE_BACK = "write_back"
    FETCH = "fetch"
    COMPLETE = "complete"
    FAIL = "fail"
    EVICT = "evict"
    DROP_COPY = "drop_copy"
    MOVE = "move"
    FREE = "free"


#: With a device tier: the state after an operation, by the state before.
TWO_TIERS: dict[Operation, dict[State, State]] = {
    Operation.ALLOCATE: {State.FREE: State.FILLING},
    Operation.SEAL: {State.FILLING: State.DEVICE},
    Operation.REOPEN: {State.DEVICE: State.FILLING},
    Operation.WRITE_BACK: {State.DEVICE: State.LEAVING},
    Operation.FETCH: {State.HOST: State.ARRIVING},
    Operation.COMPLETE: {State.LEAVING: State.BOTH, State.ARRIVING: State.BOTH},
    Operation.FAIL: {State.LEAVING: State.DEVICE, State.ARRIVING: State.HOST},
    Operation.EVICT: {State.BOTH: State.HOST, State.ARRIVING: State.HOST},
    Operation.DROP_COPY: {State.BOTH: State.DEVICE},
    Operation.MOVE: {s: s for s in (State.FILLING, State.DEVICE, State.BOTH, State.HOST)},
    Operation.FREE: {s: State.FREE for s in State if s is not State.FREE},
}
#: Without one.
ONE_TIER: dict[Operation, dict[State, State]] = {
    Operation.ALLOCATE: {State.FREE: State.FILLING},
    Operation.SEAL: {State.FILLING: State.HOST},
    Operation.REOPEN: {State.HOST: State.FILLING},
    Operation.MOVE: {s: s for s in (State.FILLING, State.HOST)},
    Operation.FREE: {s: State.FREE for s in (State.FILLING, State.HOST)},
}


def allocate(blocks: BlockSet, start: int, count: int) -> Run:
    """A new run in slots that the caller took from the home pool."""
    one_tier = blocks.pools.device is None
    run = Run(blocks, count, None if one_tier else start, start if one_tier else None)
    blocks.runs[run] = None
    _enter(run, Operation.ALLOCATE)
    return run


def seal(run: Run) -> None:
    """All tokens are written: nothing of it changes any more."""
    _enter(run, Operation.SEAL)
    audit = run.blocks.pools.audit
    if audit is not None:
        audit.note(run)


def reopen(run: Run) -> None:
    """Let the writer of its only table write into it again: drop the host copy, which would no longer be one.

    The CPU waits for a write-back that still reads the bytes.
    """
    assert run.refs == 1, "a shared block is copied, not written"
    if run.move is not None:
        run.move.settle()
    if run.state is State.BOTH:
        drop_copy(run)
    _enter(run, Operation.REOPEN)
    run.sums = None


def write_back(runs: Sequence[tuple[Run, int]]) -> Transfer:
    """Copy sealed runs of one set to the host, in the background.

    Args:
        runs: each with the first of the host slots that the caller took for it. On failure they are given back.

    Returns:
        The transfer; where it has failed already, the runs are as they were.
    """
    move = Move([run for run, _ in runs])
    pools = runs[0][0].blocks.pools
    assert pools.device is not None
    copies = []
    for run, slot in runs:
        _enter(run, Operation.WRITE_BACK)
        assert run.device is not None
        run.host, run.move = slot, move
        copies.append(Copy(pools.device.span(run.device, run.count), pools.host.span(slot, run.count)))
    return _submit(move, joined(copies), Direction.WRITE_BACK, (), None)


def fetch(
    runs: Sequence[tuple[Run, int]], behind: Sequence[Event] | None = None, counters: Counters | None = None
) -> Transfer:
    """Copy runs of one set to the device, in the background.

    Args:
        runs: each with the first of the device slots that the caller took for it. On failure they are given back.
        behind: the last readers of these slots, which the copies begin behind; None: all compute so far.
        counters: of who asks; None: of who owns the set.

    Returns:
        The transfer; where it has failed already, the runs are as they were.
    """
    move = Move([run for run, _ in runs])
    pools, after = runs[0][0].blocks.pools, list[Transfer]()
    assert pools.device is not None
    copies = []
    for run, slot in runs:
        _enter(run, Operation.FETCH)
        assert run.host is not None
        if run.move is not None and run.move.transfer is not None:
            after.append(run.move.transfer)
        run.device, run.move = slot, move
        copies.append(Copy(pools.host.span(run.host, run.count), pools.device.span(slot, run.count)))
    counters = counters or runs[0][0].blocks.counters
    counters.block_fetches += sum(run.count for run, _ in runs)
    return _submit(move, joined(copies), Direction.FETCH, after, behind, counters)


def _submit(
    move: Move,
    copies: list[Copy],
    direction: Direction,
    after: Sequence[Transfer],
    behind: Sequence[Event] | None,
    counters: Counters | None = None,
) -> Transfer:
    blocks = move.runs[0].blocks

    def done() -> None:
        for run in move.runs:
            if run.move is move:
                run.move = None
                if run.state is State.LEAVING:
                    _enter(run, Operation.COMPLETE)
                    if blocks.pools.audit is not None:
                        blocks.pools.audit.note(run)
                elif run.state is State.ARRIVING:
                    _enter(run, Operation.COMPLETE)

    def failed() -> None:
        for run in move.runs:
            if run.move is move:
                run.move = None
                _fail(run)

    engine = blocks.pools.engine
    try:
        move.transfer = engine.submit(
            copies,
            direction,
            counters or blocks.counters,
            after=after,
            behind=behind,
            on_done=done,
            on_failed=failed,
            layer=blocks.layer,
        )
    except Exception as error:
        if undone(error):
            failed()
        raise  # an interrupt leaves the copies under way: see `TieredMemory.recover`
    return move.transfer


def _fail(run: Run) -> None:
    pools = run.blocks.pools
    if run.state is State.LEAVING:
        _enter(run, Operation.FAIL)
        assert run.host is not None
        pools.host.give(run.host, run.count)
        run.host = None
    elif run.state is State.ARRIVING:
        _enter(run, Operation.FAIL)
        assert run.device is not None
        assert pools.device is not None
        pools.device.give(run.device, run.count)
        run.device = None


def arrive(run: Run) -> None:
    """Order what the compute stream does from now on behind the fetch of this run.

    Raises:
        TransferError: it failed; the run is on the host only.
    """
    move = run.move
    if run.state is not State.ARRIVING:
        return
    assert move is not None
    assert move.transfer is not None
    move.transfer.wait()
    for each in move.runs:
        if each.move is move and each.state is State.ARRIVING:
            # The copy may go on; the move stays as the fence of its host slots.
            _enter(each, Operation.COMPLETE)


def evict(run: Run, fence: Fence | None) -> None:
    """Give up the device slots of a run whose host copy exists, or whose fetch nobody wants any more. Moves no bytes.

    Args:
        fence: what holds the slots until their last readers have ended.
    """
    pools, move = run.blocks.pools, run.move
    assert run.device is not None
    assert pools.device is not None
    if run.state is State.ARRIVING:
        assert move is not None
        fence = move if fence is None else Fences(move, fence)  # the copy still writes
    _enter(run, Operation.EVICT)
    pools.device.give(run.device, run.count, fence)
    run.device = None
    run.blocks.counters.evictions += run.count


def drop_copy(run: Run, fence: Fence | None = None) -> None:
    """Give up the host slots of a run that is on the device too."""
    under = _under(run)
    if under is not None:
        fence = under if fence is None else Fences(under, fence)
    assert run.host is not None
    _enter(run, Operation.DROP_COPY)
    run.blocks.pools.host.give(run.host, run.count, fence)
    run.host = None


def move(run: Run, pool: BlockPool, slot: int) -> tuple[int, int]:
    """Move a run that no copy is reading or writing to other slots of one tier.

    Args:
        pool: the device's or the host's.
        slot: the first of the slots that the caller took there.

    Returns:
        The slots that it had, first and count, for the caller to give back.
    """
    assert _under(run) is None, "a copy still uses its slots"
    on_host = pool is run.blocks.pools.host
    before = run.host if on_host else run.device
    assert before is not None
    pool.bytes(slot, run.count).copy_(pool.bytes(before, run.count))
    _enter(run, Operation.MOVE)
    if on_host:
        run.host = slot
    else:
        run.device = slot
    run.blocks.counters.moved_blocks += run.count
    return before, run.count


def can_move(run: Run) -> bool:
    """Whether `move` may be called: no copy is reading or writing it."""
    return run.state in TWO_TIERS[Operation.MOVE] and _under(run) is None


def free(run: Run, fence: Fence | None) -> None:
    """No table holds it any more. Slots under a copy or a reader are held until that is over."""
    pools, under = run.blocks.pools, _under(run)
    if under is not None:
        fence = under if fence is None else Fences(under, fence)
    _enter(run, Operation.FREE)
    if run.device is not None:
        assert pools.device is not None
        pools.device.give(run.device, run.count, fence)
    if run.host is not None:
        pools.host.give(run.host, run.count, fence)
    run.device = run.host = None
    del run.blocks.runs[run]


def cut(run: Run, count: int) -> tuple[Run, Run]:
    """Cut a run behind its first `count` blocks. Tables that hold it find the parts through it."""
    assert 0 < count < run.count
    blocks = run.blocks
    left = Run(blocks, count, run.device, run.host)
    right = Run(
        blocks,
        run.count - count,
        None if run.device is None else run.device + count,
        None if run.host is None else run.host + count,
    )
    for part in (left, right):
        part.state, part.refs, part.move, part.corrupt = run.state, run.refs, run.move, run.corrupt
    if run.sums is not None:
        left.sums, right.sums = run.sums[:count], run.sums[count:]
    run.parts = (left, right)  # first: whatever cuts this short, `repair` finds the parts
    for part in run.parts:
        blocks.runs[part] = None
    del blocks.runs[run]
    for order in (blocks.resident, blocks.dirty, [] if run.move is None else run.move.runs):
        if run in order:
            at = order.index(run)
            order[at : at + 1] = left, right
    blocks.changed()
    return left, right


def can_join(run: Run, other: Run) -> bool:
    """Whether two runs that are neighbours in the only table that holds them can be one."""
    return (
        run.state is other.state
        and run.sealed
        and run.refs == other.refs == 1
        and run.move is other.move is None
        and run.blocks is other.blocks
        and (run.sums is None) == (other.sums is None)
        and not (run.corrupt or other.corrupt)
        and (run.device is None or run.device + run.count == other.device)
        and (run.host is None or run.host + run.count == other.host)
    )


def join(run: Run, other: Run) -> None:
    """Let `run` take in `other`, which ends."""
    blocks = run.blocks
    for order in (blocks.resident, blocks.dirty):
        if other in order:
            order.remove(other)
    del blocks.runs[other]
    if run.sums is not None and other.sums is not None:
        run.sums = run.sums + other.sums
    run.count += other.count
    other.state = State.FREE
    blocks.changed()


def adopt(run: Run, parked: BlockSet) -> None:
    """Let a set of parked blocks of the same layer count a run. Moves no bytes and changes no state."""
    before = run.blocks
    if before is parked:
        return
    assert parked.parked, "blocks come to a cache by being written"
    assert run.sealed, "an open block"
    assert before.pools is parked.pools, "a set of other pools"
    parked.runs[run] = None  # first: whatever cuts this short, `repair` leaves it in the set that it names
    run.blocks = parked
    del before.runs[run]
    before.counts[run.state] -= run.count
    parked.counts[run.state] += run.count
    for old, new in ((before.resident, parked.resident), (before.dirty, parked.dirty)):
        if run in old:
            old.remove(run)
            new.append(run)
    before.changed()
    parked.changed()


def repair(blocks: BlockSet) -> None:
    """After a change of this set was cut short, and all copies have settled: make its lists and counts agree again.

    A run whose copy was never submitted is as it was before.
    """
    for run in list(blocks.runs):
        if run.parts is not None:
            blocks.runs.update(dict.fromkeys(run.leaves()))
    for run in list(blocks.runs):
        run.move = None
        if run.state is State.LEAVING:
            run.state, run.host = State.DEVICE, None
        elif run.state is State.ARRIVING:
            run.state, run.device = State.HOST, None
        if blocks.pools.device is not None:  # slots that were being given up, or were not taken yet
            if run.state is State.HOST:
                run.device = None
            elif run.state in (State.DEVICE, State.FILLING):
                run.host = None
        gone = run.parts is not None or run.state is State.FREE or run.refs <= 0 or run.blocks is not blocks
        if gone or (run.device is None and run.host is None):
            del blocks.runs[run]
    blocks.counts[:] = [0] * len(State)
    audit = blocks.pools.audit
    for run in blocks.runs:
        blocks.counts[run.state] += run.count
        if audit is not None and run.sealed and run.state in (State.HOST, State.BOTH):
            audit.note(run)  # if that was cut short
    order = {run: i for i, run in enumerate([*blocks.resident, *blocks.runs])}
    blocks.resident[:] = sorted((run for run in blocks.runs if run.state in RESIDENT), key=order.__getitem__)
    blocks.dirty[:] = [run for run in blocks.resident if run.state is State.DEVICE]
    blocks.changed()


def _under(run: Run) -> Fence | None:
    """The copy that may still use the slots of a run."""
    move = run.move
    return move if move is not None and move.transfer is not None and move.transfer.pending else None


def _enter(run: Run, operation: Operation) -> None:
    """Let a run enter the state after an operation, and count it there. Besides, `cut` gives the parts the state of the
    run, `join` ends a run, and `repair` goes back to the state before a copy."""
    blocks = run.blocks
    old = run.state
    new = (ONE_TIER if blocks.pools.device is None else TWO_TIERS)[operation].get(old)
    assert new is not None, f"{operation.value} of a run that is {old.name}"
    if old is not State.FREE:
        blocks.counts[old] -= run.count
    if new is not State.FREE:
        blocks.counts[new] += run.count
    run.state = new
    blocks.changed()
    pools = blocks.pools
    if pools.device is None:
        return
    if new is State.HOST or old is State.HOST:
        pools.spilled += (new is State.HOST) * run.count - (old is State.HOST) * run.count
    if (old in RESIDENT) != (new in RESIDENT):
        blocks.resident.remove(run) if old in RESIDENT else blocks.resident.append(run)
    if (old is State.DEVICE) != (new is State.DEVICE):
        blocks.dirty.remove(run) if old is State.DEVICE else blocks.dirty.append(run)
