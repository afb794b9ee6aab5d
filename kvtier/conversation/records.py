"""What a conversation is while nobody holds it: in memory its attributes, on the disk what JSON takes."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Mapping
from typing import Any

from kvtier.conversation.conversation import Conversation, Store
from kvtier.conversation.disk.rows.conversations import ids_of
from kvtier.conversation.disk.rows.pieces import Written
from kvtier.conversation.kept.ranks import saved_rank
from kvtier.eviction.rank import DEFAULT


def can_be_saved(chat: Conversation) -> bool:
    """Whether later processes can know a conversation: not by a salt of another kind than a string or a whole
    number."""
    return chat.salt is None or type(chat.salt) in (str, int)


def is_blank(chat: Conversation) -> bool:
    """Whether there is nothing in a conversation that another one of its name would not have."""
    return not chat.ids and not chat.messages and chat.rank == DEFAULT


def ranked_ids(chat: Conversation) -> bytes:
    """The tokens of a history that were computed, packed; without a rank of its own none, for nobody looks for them,
    and none where its user has put there what is no token ids."""
    return b"" if chat.rank == DEFAULT else ids_of({"ids": chat.ids[:-1]})


def record_of(chat: Conversation) -> dict[str, Any]:
    """What a conversation is, as JSON takes it."""
    says = vars(chat).copy()  # ids, messages and ends of one turn
    # Lists, as JSON reads them: what was read and has not changed is equal to them, and is not written.
    record = {name: says[name] for name in ("ids", "messages", "salt")} | {"ends": [[*x] for x in says["ends"].items()]}
    rank = says["rank"]
    if rank != DEFAULT:
        record |= {"pinned": rank.pinned, "priority": rank.priority}
        record["ttl"] = None if rank.ttl == math.inf else rank.ttl
    return record | {"used": says["used"]}


def conversation_of(store: Store, name: str, record: Mapping[str, Any], written: Written) -> Conversation:
    """A conversation as it was saved; what is damaged is left out. Messages are what their user has made of them."""
    made = Conversation(store, name, record.get("salt"))
    made.written = written
    ids, messages = record.get("ids"), record.get("messages")
    if isinstance(ids, list) and all(type(x) is int for x in ids):
        made.ids = ids
    if isinstance(messages, list):
        made.messages = messages
    ends = record.get("ends")
    if isinstance(ends, list) and all(isinstance(x, list) and [type(y) for y in x] == [int, int] for x in ends):
        made.ends = dict(ends)
    made.rank = saved_rank(record)
    used = record.get("used")
    if isinstance(used, (int, float)) and used < made.used:  # clocks are set back
        made.used = float(used)
    return made


def again(says: Mapping[str, Any]) -> Conversation:
    """A conversation with the attributes of one that nobody holds any more."""
    made = Conversation.__new__(Conversation)
    ids = says["ids"]
    vars(made).update(says, ids=ids.tolist() if isinstance(ids, array) else ids)
    return made


def pack(says: dict[str, Any]) -> None:
    """Let the attributes of one that nobody holds take less room; what are no token ids stay as they are."""
    if type(says["ids"]) is list:
        with contextlib.suppress(TypeError, OverflowError):
            says["ids"] = array("q", says["ids"])
