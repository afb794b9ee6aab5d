"""What callers give: names, salts, ids, counts, budgets, messages; and what is said of those that cannot be."""

from __future__ import annotations

import copy
import reprlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from kvtier.config import Size
from kvtier.conversation.index import packed
from kvtier.errors import ConfigError
from kvtier.hf.cache.options import given_memory
from kvtier.hf.models.checkpoint.templates import is_processor
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.policies.names import PolicyName
from kvtier.planning.policy import Policy

#: Characters of a conversation's name. It is a part of every row that is saved of it.
LONGEST_NAME = 2**16
#: Words in the type of a part of a message that is no text.
_NO_TEXT = ("image", "video", "audio")


def check_name(name: object) -> None:
    """Whether a conversation can have a name.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name={reprlib.repr(name)}: a conversation has a name, a string that is not empty.")
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"name={reprlib.repr(name)} has {len(name)} characters: a conversation's name has {LONGEST_NAME} at most."
        )


def check_salt(salt: object) -> None:
    """Whether calls can be found by a salt.

    Raises:
        ConfigError: they cannot.
    """
    try:
        hash(salt)
    except TypeError:
        raise ConfigError(
            f"salt={reprlib.repr(salt)} cannot be compared: give a string, a number or a tuple of these."
        ) from None


def check_count(name: str, count: object, least: int | None = None) -> None:
    """Whether an argument of this name is how many there are of something, and no fewer than there may be.

    Raises:
        ConfigError: it is none.
    """
    if type(count) is not int or (least is not None and count < least):
        least_is = "" if least is None else f" from {least} on"
        raise ConfigError(f"{name}={reprlib.repr(count)}: give how many, a whole number{least_is}.")


def check_beginning(begin: object, is_of_encoder: bool) -> None:
    """Whether an answer can begin like this; None: as the model begins it.

    Raises:
        ConfigError: it cannot.
    """
    if begin is not None and not isinstance(begin, str):
        raise ConfigError(f"begin={reprlib.repr(begin)}: give the text that the answer begins with.")
    if begin and is_of_encoder:
        raise ConfigError("begin= is of a prompt that the answer follows, and an encoder-decoder writes it apart.")


def check_span(start: object, stop: object, tokens: int) -> None:
    """Whether these are some tokens of a sequence that has so many.

    Raises:
        ConfigError: they are none.
    """
    if type(start) is not int or type(stop) is not int:
        raise ConfigError(f"start={start!r}, stop={stop!r}: give two positions, whole numbers.")
    if not 0 <= start < stop <= tokens:
        raise ConfigError(f"start={start}, stop={stop}: the sequence has {tokens} tokens.")


def check_seconds(name: str, seconds: object) -> None:
    """Whether an argument of this name is how long to wait, or None: without end.

    Raises:
        ConfigError: it is neither.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 <= seconds < threading.TIMEOUT_MAX):  # type: ignore[operator]
        raise ConfigError(f"{name}={seconds!r}: give seconds, or None.")


def token_ids(ids: object) -> bytes:
    """Token ids `[tokens]`, a sequence or a tensor, packed; none are a sequence without tokens.

    Raises:
        ConfigError: they are no token ids.
    """
    given = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    try:
        if isinstance(given, (str, bytes, bytearray, memoryview)):  # of which Python would take each character
            raise TypeError
        return packed(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"ids={reprlib.repr(given)} are no token ids: give those of one sequence, a list of whole numbers."
        ) from None


def memory_of(
    memory: TieredMemory | None,
    device_budget: Size | Mapping[str, Size] | None,
    host_budget: Size | None,
    policy: Policy | PolicyName | None,
    audit: Literal["off", "sampled", "full"] | None,
) -> TieredMemory:
    """The memory that a store is given, or one of its own with these options.

    Raises:
        ConfigError: an option that is malformed, or that goes with no memory that is given.
    """
    if memory is None:
        host_budget, audit = "auto" if host_budget is None else host_budget, "sampled" if audit is None else audit
        return TieredMemory(device_budget=device_budget, host_budget=host_budget, policy=policy, audit=audit)
    given = {"device_budget": device_budget, "host_budget": host_budget, "policy": policy, "audit": audit}
    return given_memory("store", memory, given)


def message_of(message: object) -> dict[str, Any]:
    """A message of a chat: of a string, the user's; of a message, a copy, which nobody changes from outside.

    Raises:
        ConfigError: neither a string nor a message.
    """
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"message={reprlib.repr(message)}: give a string, or a mapping with a role, as of a tool.")
    return copy.deepcopy(dict(message))


def role_of(message: object) -> Any:
    """The role of a message; None: it has none. Its user may have put it among the messages of a chat by hand."""
    return message.get("role") if isinstance(message, Mapping) else None


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says where there is no template: its content, a string or parts of text. One that only calls tools
    has none."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)


#: What to do with a chat that is not of text only.
_WAY_OUT = "Give `generate` of the conversation all that the model's processor makes of the messages."


def check_tokenizer(tokenizer: object) -> None:
    """Whether it makes prompts of text, and nothing else.

    Raises:
        ConfigError: it is a processor.
    """
    if is_processor(tokenizer):
        raise ConfigError(
            f"tokenizer={type(tokenizer).__name__}: a chat is of text, and this is a processor. Give its tokenizer, "
            f"`processor.tokenizer`. For a chat with images or sounds: {_WAY_OUT}"
        )


def check_text(messages: Sequence[Mapping[str, Any]]) -> None:
    """Whether a chat can say messages: a chat gives a model token ids, and nothing else.

    Raises:
        ConfigError: one is no message, or a part of one no text.
    """
    odd = next((message for message in messages if not isinstance(message, Mapping)), None)
    if odd is not None:
        raise ConfigError(f"{reprlib.repr(odd)} is among the messages of this chat, and is none: take it out.")
    contents = [message.get("content") for message in messages]
    parts = [x for content in contents if isinstance(content, (list, tuple)) for x in content if isinstance(x, Mapping)]
    for part in parts:
        # Templates know a picture by either.
        for kind in (str(part.get("type")), *map(str, part)):
            if any(word in kind for word in _NO_TEXT):
                raise ConfigError(f"A chat is of text, and a part of a message is of type {kind!r}. {_WAY_OUT}")
