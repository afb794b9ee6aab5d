"""What is kept of one conversation's tokens, and of no other's, is removed from memory and from the disk."""

from __future__ import annotations

from collections.abc import Hashable

from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.rows.conversations import ids_of
from kvtier.conversation.index import common
from kvtier.conversation.kept.kept import Kept
from kvtier.conversation.names import Conversations
from kvtier.conversation.saved.disk_tier import DiskTier
from kvtier.memory.tiered import TieredMemory


def shared(chat: Conversation, conversations: Conversations) -> int:
    """The most tokens that a conversation has in common with another one of its salt. The token ids of all of them are
    read.

    Raises:
        ConfigError: one is saved and cannot be read now.
    """
    ids, most = ids_of(vars(chat)), 0
    for name in conversations.names:
        says = {} if name == chat.name else conversations.says(name)
        if says.get("salt") == chat.salt:
            most = max(most, common(ids, ids_of(says)))
    return most


def erase(salt: Hashable, ids: bytes, start: int, memory: TieredMemory, kept: Kept, tier: DiskTier | None) -> None:
    """Remove what is kept under a salt and begins with more than the first `start` tokens of a sequence, behind these.

    Raises:
        ConfigError: what is saved cannot be removed now. What is in memory is.
    """
    with memory.lock, memory.change:
        for entry in list(kept.entries.values()):
            if isinstance(entry.key, tuple) and entry.key[-1] == salt and common(entry.ids, ids) > start:
                kept.shorten(entry, start)
    if tier is not None:
        tier.erase(salt, ids, start)
