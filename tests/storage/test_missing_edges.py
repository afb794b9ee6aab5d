"""The race detector finds what it is for: without any one edge it names the pair of accesses that raced.

For each direction the writer comes before the copy, the copy before its reader, and the reader before the bytes are
used again. A test here that fails means that the detector went blind or that an edge moved, not that there is a race.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from stream_model import Race, StreamModel
from test_mutations import edit
from test_ordering import BLOCK, DIM, HEADS, SLOT, STEPS, Conversation, by_launch
from torch.nn import functional as F

from kvtier import TieredKVCache
from kvtier.attention import split
from kvtier.cpu import native
from kvtier.metrics import Counters
from kvtier.storage.gather import Reader, dense_kv, stream_slots
from kvtier.storage.links import Launches
from kvtier.storage.staging import StagingArea
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import Copy, CudaTransfers, TensorCopy
from kvtier.testing import with_doubles
from kvtier.types import Direction

Patch = pytest.MonkeyPatch
FETCH, WRITE_BACK, QUERY, RESULT = Direction
MOVES = (FETCH, WRITE_BACK)


@dataclass(frozen=True)
class Broken:
    """A way to lose an edge.

    Attributes:
        name: what is lost.
        changes: of the code.
        pair: who races then, the earlier first.
        host: whether host threads attend.
    """

    name: str
    changes: tuple[Callable[[Patch], None], ...]
    pair: tuple[str, str]
    host: bool = False


def begins_at_once(direction: Direction) -> Callable[[Patch], None]:
    """Copies in one direction do not wait for what the compute stream did before."""
    new = f"None if transfer.direction is Direction.{direction.name} else stream.wait_event(began)"
    return edit(CudaTransfers, "_start", "stream.wait_event(began)", new)


def protects_only(end: str) -> Callable[[Patch], None]:
    """Copies hold references at one end only."""
    both = "((self.src, self.src_slot), (self.dst, self.dst_slot))"

    def apply(patch: Patch) -> None:
        for name in ("retain", "release"):
            edit(Copy, name, both, f"((self.{end}, self.{end}_slot),)")(patch)

    return apply


def both_ways(old: str, new: str) -> Callable[[Patch], None]:
    return edit(split, "_both", old, new)  # type: ignore[arg-type]


EVICT_LEARNS_NOTHING = edit(Tiers, "evict", "block.pending.synchronize()", "pass")
EVICT_ONLY_WAITS = edit(Tiers, "evict", "block.pending.synchronize()", "block.pending.wait()")
FETCH_FOLLOWS_NOBODY = edit(StagingArea, "fetch", "after=after", "after=()")
# The job goes on; it is waited for when the future goes away.
JOB_IS_NOT_AWAITED = both_ways("future.wait()", "future.done()")

WRITER, READER, REUSE = "the writer before the copy", "the copy before its reader", "the reader before the next use"
EDGES: dict[tuple[str, Direction], tuple[Broken, ...]] = {
    (WRITER, FETCH): (
        # Twice over: eviction waits on the CPU until the block is down, and a fetch follows what is pending still.
        Broken(
            "evict's synchronize, and after=",
            (EVICT_LEARNS_NOTHING, FETCH_FOLLOWS_NOBODY),
            ("write_back writes", "fetch reads"),
        ),
    ),
    (READER, FETCH): (
        Broken(
            "Reader.fetched: wait",
            (edit(Reader, "fetched", "staging.transfer.wait()", "pass"),),
            ("fetch writes", "compute reads"),
        ),
        Broken(
            "LayerStore._copy_of: wait",
            (edit(LayerStore, "_copy_of", "after=after).wait()", "after=after)"),),
            ("fetch writes", "compute writes"),
        ),
    ),
    (REUSE, FETCH): (
        # Staged slots are free as soon as the copy out of them is enqueued: the next fetch begins behind it.
        Broken("a staged slot is fetched into", (begins_at_once(FETCH),), ("compute reads", "fetch writes")),
        # What a fetch reads and writes it protects itself: see also the dropped prefetch below.
        Broken("the slot of a dropped fetch is freed", (protects_only("src"),), ("fetch writes", "compute writes")),
    ),
    (WRITER, WRITE_BACK): (
        Broken("began of write-backs", (begins_at_once(WRITE_BACK),), ("compute writes", "write_back reads")),
    ),
    (READER, WRITE_BACK): (
        Broken("evict's synchronize", (EVICT_LEARNS_NOTHING,), ("write_back writes", "host threads reads"), True),
        # A wait of the compute stream would do, but only because the query comes down behind it.
        Broken(
            "evict only waits, began of queries",
            (EVICT_ONLY_WAITS, begins_at_once(QUERY)),
            ("write_back writes", "host threads reads"),
            host=True,
        ),
    ),
    (REUSE, WRITE_BACK): (
        Broken("the near slot it reads is freed", (protects_only("dst"),), ("write_back reads", "compute writes")),
        Broken(
            "the block it reads is opened again",
            (edit(LayerStore, "_open_tail", "block.pending.wait()", "pass"),),
            ("write_back reads", "compute writes"),
        ),
        Broken(
            "the far slot is written while a job reads it",
            (JOB_IS_NOT_AWAITED,),
            ("host threads reads", "write_back writes"),
            host=True,
        ),
    ),
    (WRITER, QUERY): (Broken("began of queries", (begins_at_once(QUERY),), ("compute writes", "query reads"), True),),
    (READER, QUERY): (
        Broken(
            "only the compute stream waits for the query",
            (both_ways("down.synchronize()", "down.wait()"),),
            ("query writes", "host threads reads"),
            host=True,
        ),
    ),
    (REUSE, QUERY): (
        Broken("the next query comes down", (JOB_IS_NOT_AWAITED,), ("host threads reads", "query writes"), True),
        Broken(
            "the model makes its next query",
            (both_ways("down.synchronize()", "pass"),),
            ("query reads", "compute writes"),
            host=True,
        ),
    ),
    (WRITER, RESULT): (
        Broken("the job is not awaited", (JOB_IS_NOT_AWAITED,), ("host threads writes", "result reads"), True),
    ),
    (READER, RESULT): (
        Broken("back.wait", (both_ways("back.wait()", "pass"),), ("result writes", "compute reads"), True),
    ),
    (REUSE, RESULT): (
        # Three links: the compute stream waits for the result, the next query begins behind that, the CPU waits for it.
        *(
            Broken(f"link {i}", (change,), ("result reads", "host threads writes"), host=True)
            for i, change in enumerate(
                (both_ways("back.wait()", "pass"), begins_at_once(QUERY), both_ways("down.synchronize()", "pass")), 1
            )
        ),
    ),
}
BROKEN = [pytest.param(x, id=f"{d}-{e}-{x.name}") for (e, d), ways in EDGES.items() for x in ways]
#: Of these, the edges of what moves blocks.
OF_BLOCKS = [pytest.param(x, id=f"{d}-{e}-{x.name}") for (e, d), ways in EDGES.items() for x in ways if d in MOVES]
#: How the addresses of a launch may be written over while it may still read them.
ADDRESSES = {
    "are used again at once": edit(
        CudaTransfers, "_start", "ended.record(stream)", "self._launches.release(ticket.batches), ended.record(stream)"
    ),
    "belong to whoever comes next": edit(Launches, "_take", "self._spare.pop(i)", "addresses"),
}


def races(broken: Broken, seeds: int = 8) -> set[tuple[str, str]]:
    """The pairs that race in some conversations, until the one that is looked for does."""
    found: set[tuple[str, str]] = set()
    for seed in range(seeds):
        with Patch.context() as patch:
            for change in broken.changes:
                change(patch)
            # Events as late as can be: what the CPU learns by luck orders much.
            with StreamModel(seed, patch, eagerness=0.05, strict=False) as model:
                talk = Conversation(model, seed, host_attention=broken.host)
                for _ in range(STEPS):
                    talk.step()
                    if broken.pair in model.pairs:
                        break
                talk.cache.close()
        found |= model.pairs
        if broken.pair in found:
            break
    return found


def test_every_edge_of_every_direction_is_broken_somewhere() -> None:
    assert set(EDGES) == set(itertools.product((WRITER, READER, REUSE), Direction))


@pytest.mark.parametrize("broken", BROKEN)
@torch.no_grad()
def test_without_an_edge_the_pair_it_orders_races(broken: Broken) -> None:
    if broken.host and not native.available():
        pytest.skip("the native library is not compiled")
    assert broken.pair in races(broken)


@pytest.mark.parametrize("broken", OF_BLOCKS)
@torch.no_grad()
def test_without_an_edge_launches_race_as_copies_do(broken: Broken, monkeypatch: Patch) -> None:
    if broken.host and not native.available():
        pytest.skip("the native library is not compiled")
    by_launch(monkeypatch)
    assert broken.pair in races(broken)


@pytest.mark.parametrize("lost", [None, *ADDRESSES])
@torch.no_grad()
def test_addresses_are_not_written_over_while_a_launch_may_read_them(lost: str | None, monkeypatch: Patch) -> None:
    by_launch(monkeypatch)
    changes = () if lost is None else (ADDRESSES[lost],)
    for direction in MOVES:
        pair = (f"{direction} reads", "host writes")
        assert (pair in races(Broken("", changes, pair), seeds=8 if lost else 2)) == (lost is not None)


@pytest.mark.parametrize("change", [EVICT_LEARNS_NOTHING, FETCH_FOLLOWS_NOBODY], ids=["after=", "synchronize"])
@torch.no_grad()
def test_a_fetch_follows_the_write_back_by_either_of_two_edges(change: Callable[[Patch], None]) -> None:
    """Where nothing attends on the host, each is enough without the other."""
    assert races(Broken("", (change,), ("", "")), seeds=3) == set()


def dropped_prefetch(model: StreamModel) -> None:
    """Blocks are dropped while a prefetch of them is on its way, and their slots in both tiers are wanted again."""
    cache = TieredKVCache(
        device_budget=10**5, host_budget=4 * SLOT, block_size=BLOCK, host_attention=False, write_through=1.0
    )
    with_doubles(cache, model.engine, poison=False)
    for _ in range(2):
        tokens = torch.randn(1, HEADS, 2 * BLOCK, DIM)
        cache.update(tokens, tokens, 0)
        store = cache._runtime.layers[0]
        for block in list(store.resident):
            store.tiers.evict(block)
        store.tiers.staging.prefetch(store)
        cache.crop(-2 * BLOCK)
        store.last_far = None  # begin where slots are free, not behind the last ones
    cache.close()


@pytest.mark.parametrize("launches", [False, True], ids=["copies", "launches"])
@pytest.mark.parametrize(
    ("end", "pair"),
    [(None, None), ("src", ("fetch writes", "compute writes")), ("dst", ("fetch reads", "write_back writes"))],
)
def test_a_dropped_prefetch_keeps_its_slots_until_it_ends(
    end: str | None, pair: tuple[str, str] | None, launches: bool, monkeypatch: Patch
) -> None:
    if launches:
        by_launch(monkeypatch)
    if end is not None:
        protects_only(end)(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        dropped_prefetch(model)
    assert pair in model.pairs if pair else not model.pairs
    assert (model.launches > 0) == launches


@pytest.mark.parametrize("waits", [True, False])
@torch.no_grad()
def test_what_was_fetched_in_vain_has_arrived_when_it_is_kept(waits: bool, monkeypatch: Patch) -> None:
    """Somebody stops reading a layer while the next part is on its way; there is room to keep that."""
    if not waits:
        edit(StagingArea, "finish", "staging.arrives()", "True")(monkeypatch)
    pair = ("fetch writes", "compute reads")
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        cache = TieredKVCache(device_budget=100 * SLOT, host_budget=100 * SLOT, block_size=BLOCK, host_attention=False)
        with_doubles(cache, model.engine)
        tokens = torch.randn(1, HEADS, 16 * BLOCK, DIM)
        cache.update(tokens, tokens, 0)
        store = cache._runtime.layers[0]
        for block in list(store.resident):
            store.tiers.evict(block)
        parts = stream_slots(store, store.length, 4)
        next(parts)
        parts.close()
        assert cache.stats.promotions > 4, "some of what nobody read"
        keys, _ = dense_kv(store, store.length)
        assert waits <= torch.equal(keys, tokens)
        cache.close()
    assert model.pairs == (set() if waits else {pair})


@pytest.mark.parametrize("launches", [False, True], ids=["copies", "launches"])
@torch.no_grad()
def test_memory_is_not_given_back_under_a_copy(launches: bool, monkeypatch: Patch) -> None:
    if launches:
        by_launch(monkeypatch)
    edit(Tiers, "close", "self.engine.close()", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0) as model:
        talk = Conversation(model, 0, host_attention=False)
        talk.forward(40)
        talk.forward(1)
        with pytest.raises(Race, match="given back"):
            talk.cache.close()


@pytest.mark.parametrize("direction", Direction)
def test_no_copy_overtakes_the_compute_stream(direction: Direction) -> None:
    up = direction in (FETCH, RESULT)
    pair = ("compute reads", f"{direction} writes") if up else ("compute writes", f"{direction} reads")
    for change in (None, begins_at_once(direction)):
        with Patch.context() as patch:
            if change is not None:
                change(patch)
            with StreamModel(0, patch, strict=False) as model:
                host, device = torch.empty(8), torch.empty(8)
                model.watch(host, "host buffer")
                engine = model.engine(torch.device("cpu"), Counters())
                if up:
                    device.sum()
                else:
                    device.fill_(1)
                copy = TensorCopy(host, device) if up else TensorCopy(device, host)
                engine.submit([copy], direction)
                engine.close()
        assert model.pairs == (set() if change is None else {pair})


@pytest.mark.parametrize("polls", [True, False])
@torch.no_grad()
def test_results_that_were_read_do_not_pile_up(polls: bool, monkeypatch: Patch) -> None:
    """A transfer that has ended holds on to its tensors until somebody asks; a block may take long to fill."""
    if not polls:
        both_ways("engine.poll()", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=1.0) as model:
        cache = TieredKVCache(device_budget=40_000, host_budget=10**6, block_size=64, host_attention=True)
        with_doubles(cache, model.engine)
        tokens = torch.randn(1, HEADS, 640, DIM)
        cache.update(tokens, tokens, 0)
        one = torch.randn(1, HEADS, 1, DIM)
        for _ in range(20):
            F.scaled_dot_product_attention(one, *cache.update(one, one, 0))
        in_flight = len(cache._runtime.layers[0].tiers.engine.in_flight())
        assert cache.stats.host_attended == 20
        assert in_flight <= 1 if polls else in_flight >= 19
        cache.close()
