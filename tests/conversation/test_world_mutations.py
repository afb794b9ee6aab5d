"""Worlds find what they are for: where something is broken on purpose, one of some worlds fails.

A test here that fails means that worlds went blind, or that what is taken away is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from test_mutations import both, ending, gone, rewritten
from world import run, worlds

from kvtier.conversation import index, records
from kvtier.conversation.calls.call import Calls
from kvtier.conversation.calls.columns import Columns
from kvtier.conversation.calls.prefix_reuse import PrefixReuse
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files import files, folder, straight
from kvtier.conversation.disk.reading import ChainReader
from kvtier.conversation.disk.room import Room
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import PrefixIndex
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.kept.kept import Kept
from kvtier.conversation.kept.ranks import Ranks
from kvtier.conversation.kept.retention import Retention
from kvtier.conversation.names import Conversations
from kvtier.conversation.saved import archive
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.disk_tier import DiskTier
from kvtier.conversation.saved.wake import Waker
from kvtier.conversation.store import ConversationStore
from kvtier.hf.models.identity import dependence
from kvtier.memory.admission import Admission
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.recovery import Recovery
from kvtier.tables.parked.sequences import ParkedSequences
from kvtier.tables.table import BlockTable
from kvtier.transfer.engine import Transfer

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_host")

Mutation = Callable[[pytest.MonkeyPatch], None]
#: Worlds, of which one has to fail: no more than a run of the tests has, in both versions of Transformers.
FIRST, WORLDS = 10**6, 2000


def edit(owner: type | ModuleType, name: str, old: str, new: str) -> Mutation:
    """A mutation by rewriting one function, everywhere it was imported to."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        was, made = owner.__dict__[name], rewritten(owner, name, old, new)
        if isinstance(was, staticmethod):
            made = staticmethod(made)
        patch.setattr(owner, name, made)
        for module in list(sys.modules.values()) if isinstance(owner, ModuleType) else ():
            if module.__name__.startswith("kvtier.") and module.__dict__.get(name) is was:
                patch.setattr(module, name, made)

    return apply


MUTATIONS: dict[str, Mutation] = {
    # transfers and memory
    "nobody waits for a fetch before reading": edit(residency, "arrive", "move.transfer.wait()", "pass"),
    "wait does nothing": gone(Transfer, "wait"),
    "slots under a copy are free at once": edit(residency, "free", "if under is not None:", "if False:"),
    "a shared head counts no references": edit(BlockTable, "head", "run.refs += 1", "pass"),
    "a tail that is cut out counts no references": edit(BlockTable, "tail", "run.refs += 1", "pass"),
    "blocks that hold other bytes are read": gone(Audit, "_compare"),
    "nothing is repaired after an interrupt": gone(Recovery, "_repair"),
    "a budget admits everything": edit(Admission, "_admit", "if demanded(limit) > limit:", "if False:"),
    "what a cache continues is not cropped": edit(
        ParkedSequences, "follow", "table.crop(length, kv.layout.block_size, layer.device.free)", "pass"
    ),
    "what was parked is never given up": gone(ParkedSequences, "give", False),
    "what is pinned is given up": edit(ParkedSequences, "give", "sequence.pinned", "0"),
    # what is found
    "two beginnings agree in one token more": edit(index, "common", "return low", "return low + 1"),
    "the index finds a token too many": edit(
        PrefixIndex, "find", "(at // WIDTH, node.some())", "(at // WIDTH + 1, node.some())"
    ),
    "an entry is not removed from the index": edit(Kept, "_forget", "self._index.remove(entry)", "pass"),
    "the index hears of no shortened sequence": edit(Kept, "_shortened", "elif entry in self._index:", "elif False:"),
    "tenants share": edit(Calls, "read", "(depends.computed_as, salt)", "(depends.computed_as, None)"),
    "adapters do not count": edit(dependence, "_computed_as", "*_adapters(modules), ", ""),
    "weights do not count": gone(ConversationStore, "_check_weights"),
    "beams change rows and their ids do not": lambda patch: patch.delattr(JournalledCache, "reorder_cache"),
    "padding is kept": edit(Kept, "keep", ":, pad:stop]", ":, 0:length]"),
    "what a row that ended was fed is kept as its tokens": edit(
        PrefixReuse, "_keep", "mine[-1] == mine[-2] == pad_token", "mine[-1] == mine[-2]"
    ),
    "states are those of the first row": edit(
        PrefixReuse, "_keep", "copied(cache.layers, row)", "copied(cache.layers, 0)"
    ),
    "states of a row are continued at another position": edit(
        PrefixReuse, "_find", "entry.states[columns] for entry", "entry.states[max(entry.states)] for entry"
    ),
    "what is used is forgotten by the eviction policy": edit(
        Retention, "keep", "if name not in self._tree:", "if False:"
    ),
    "a sequence is released before it is held": edit(
        Retention, "shortened", "if path.held and last in self._tree:", "if last in self._tree:"
    ),
    "copies of states are not counted": edit(Kept, "_add_states", "self.state_bytes += at.nbytes", "pass"),
    "copies of states have no budget": gone(Kept, "_bound_states"),
    # gaps
    "what is behind a gap is of a block before": edit(
        ParkedSequences, "cut_out", "table.tail(blocks)", "table.tail(max(blocks - 1, 0))"
    ),
    "a gap is not computed": edit(PrefixReuse, "_compute", "self._forward(run.cache, run.call, start, stop)", "pass"),
    "what is behind a gap is of any tokens": edit(Kept, "overlapping", "common(entry.ids, ids)", "len(ids) // WIDTH"),
    "what is behind a gap is not used": gone(Columns, "behind", (0, None)),
    "an entry behind a gap stays in its index": edit(Kept, "_forget", "self._behind.remove(entry)", "pass"),
    # ranks
    "a conversation that goes on leaves its rank behind": edit(Ranks, "follow", "self._leave(name, before)", "pass"),
    "only one conversation has its history in a sequence": edit(
        Ranks, "kept", "self._frontiers.prefixes(key, ids)", "list(self._frontiers.prefixes(key, ids))[:1]"
    ),
    "nobody looks where the tokens of a conversation are": gone(Ranks, "refresh"),
    "a conversation that is closed keeps its rank": gone(Ranks, "forget"),
    "a rank is not saved": edit(records, "record_of", "if rank != DEFAULT:", "if False:"),
    # wake
    "a wake that was cancelled goes on": edit(
        Waker, "step", 'if wake._goes_on(waits=wake._waits_for != ""):', "if True:"
    ),
    "a wake loads nothing": edit(Waker, "_bring", "if self._disk_tier is not None:", "if False:"),
    "a wake gives way to nobody": gone(Waker, "_concede", False),
    "a turn does not end the wake of its conversation": gone(Waker, "turn"),
    # what is saved
    "another slice is saved": edit(
        archive, "_read", "at, min(at + step, stop))", "at - (at > 0), min(at + step, stop) - (at > 0))"
    ),
    "what is to be saved is another sequence": edit(
        DiskTier, "_open", "min(length, entry.sequence.length)", "entry.sequence.length"
    ),
    "what has given up its end is saved as if it had not": edit(
        Archive, "_save_some", "min(at + portion, stop)", "min(at + portion, len(saved.ids) // WIDTH)"
    ),
    "fewer tokens are kept than were loaded": edit(
        DiskTier, "_bring", "ids[: until * WIDTH]", "ids[: (until - 1) * WIDTH]"
    ),
    "checksums are not compared": both(
        edit(files, "_checked", "!= sums", "is None"),
        edit(straight, "read_straight", " and cached.sums == sums", ""),
    ),
    "chunks are read in another order": edit(ChainReader, "parts", "chunk.chain()[::-1]", "chunk.chain()"),
    "the end of a chunk that another one continues is read": edit(
        ChainReader,
        "parts",
        "x) for x in (*(each.start for each in chain[1:]), chain[-1].stop)",
        "x.stop) for x in chain",
    ),
    "a file is named before it is on the disk": edit(files, "_write", "os.fsync(handle)", "pass"),
    "a row is written before the name of its file is on the disk": edit(
        files, "write_tensors", "sync_names(file.parent)", "pass"
    ),
    "a disk budget is none": both(gone(Room, "fits", True), gone(Room, "leaves", "")),
    "a flush does not wait": gone(Archive, "flush"),
    "the lock of a folder stays": gone(folder, "_release"),
    "a conversation that goes on is not saved": gone(Conversations, "changed"),
    "a conversation that is closed is not forgotten": gone(Disk, "drop_conversation"),
    "a rewound conversation keeps its end": edit(
        Conversation, "_rewind_turns", "ids[: ends.get(len(messages), 0)]", "ids"
    ),
    "chunks are merged in another order": edit(
        Upkeep, "_replace", "[part[name] for part in parts]", "[part[name] for part in parts[::-1]]"
    ),
}


def noticed(worlds_of: range) -> tuple[int, BaseException] | None:
    """The first world that fails, or does not end, and with what."""
    with worlds():
        for seed in worlds_of:
            try:
                with ending():
                    run(seed)
            except BaseException as error:
                if type(error) is KeyboardInterrupt:
                    raise
                return seed, error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_is_broken_on_purpose_is_noticed_in_some_world(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[mutation](monkeypatch)
    assert noticed(range(FIRST, FIRST + WORLDS)) is not None, f"in {WORLDS} worlds nobody notices it"


@pytest.mark.slow
def test_nothing_broken_makes_no_world_fail() -> None:
    found = noticed(range(FIRST, FIRST + WORLDS))
    assert found is None, f"world {found[0]}: {found[1]}"


def test_what_mutations_change_is_where_they_look_for_it() -> None:
    for mutation in MUTATIONS.values():
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
