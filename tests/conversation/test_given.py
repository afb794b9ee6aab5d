"""What cannot be a name, token ids or a count is refused alike wherever it is given, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from test_store import GREEDY, Tokenizer, ones, some_ids, store_of

from kvtier import ConfigError, ConversationStore, TieredMemory
from kvtier.conversation.given.arguments import LONGEST_NAME

NAMES: dict[str, Any] = {
    "int": 5,
    "bytes": b"alice",
    "None": None,
    "empty": "",
    "list": ["alice"],
    "too long": "x" * (LONGEST_NAME + 1),
    "huge": "x" * 10**7,
}
IDS: dict[str, Any] = {
    "int": 5,
    "bytes": b"12345678",
    "bytearray": bytearray(8),
    "None": None,
    "string": "12",
    "strings": ["1", "2"],
    "floats": [1.0, 2.0],
    "too large": [2**70],
    "rows": [[1, 2]],
    "long": [1.5] * 10_000,
    "tensor of rows": torch.tensor([[1, 2]]),
    "tensor of none": torch.tensor(5),
    "tensor of floats": torch.tensor([1.5]),
}


@pytest.fixture(scope="module")
def store() -> Iterator[ConversationStore]:
    with store_of(tiny_model("llama")) as store:
        yield store


def refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        call()
    assert len(str(error.value)) < 300, "it says all that it was given"


@pytest.mark.parametrize("wrong", NAMES)
@pytest.mark.parametrize("saved", [False, True])
def test_what_cannot_be_a_name_is_refused_everywhere(wrong: str, saved: bool, tmp_path: Path) -> None:
    name = NAMES[wrong]
    with store_of(tiny_model("llama"), **({"directory": tmp_path} if saved else {})) as store:
        chat = store.open("a")
        chat.generate(**ones(some_ids(9)), **GREEDY)
        calls: list[Callable[[], object]] = [
            lambda: store.open(name),
            lambda: store.open(name, new=True, pinned=True),
            lambda: chat.fork(name),
            lambda: store.forget(name),
        ]
        for call in calls:
            refused(call, "^name=.*conversation")
        assert store.names == ["a"]
        store.check_integrity()


def test_a_name_may_be_long(tmp_path: Path) -> None:
    name = "é" * LONGEST_NAME
    for _ in range(2):
        with store_of(tiny_model("llama"), directory=tmp_path) as store:
            store.open(name).went_on([1, 2])
            assert store.names == [name]
            assert store.stats.problem == ""


@pytest.mark.parametrize("wrong", IDS)
def test_what_cannot_be_token_ids_is_refused_everywhere(wrong: str, store: ConversationStore) -> None:
    ids = IDS[wrong]
    chat = store.open(wrong)
    chat.ids = ids
    for call in (
        lambda: store.park(ids),
        lambda: store.wake(ids),
        lambda: store.drop(ids, 0, 1),
        chat.park,
        chat.wake,
        lambda: chat.drop(0, 1),
    ):
        refused(call, "^ids=.*no token ids: give")
    chat.close()


def test_token_ids_may_be_of_any_kind_of_sequence_and_none(store: ConversationStore) -> None:
    store.generate(**ones(some_ids(20)), **GREEDY)
    ids = some_ids(20)[0]
    for given in (ids, ids.tolist(), tuple(ids.tolist()), ids.numpy(), range(20), [], [1] * 100_000):
        store.park(given)  # type: ignore[arg-type]
        store.wake(given)  # type: ignore[arg-type]
    store.drop(ids, 0, 8)  # type: ignore[arg-type]
    store.open("new").park()
    store.check_integrity()


@pytest.mark.parametrize("wrong", ["3", 1.0, b"1", [1], True, float("nan")])
def test_what_is_no_count_rewinds_nothing(wrong: Any, store: ConversationStore) -> None:
    plain, chat = store.open("plain"), store.open("chat")
    plain.generate(**ones(some_ids(9)), **GREEDY)
    chat.send("Who?", tokenizer=Tokenizer(), **GREEDY)
    was = [(list(x.ids), list(x.messages)) for x in (plain, chat)]
    refused(lambda: plain.rewind(tokens=wrong), "^tokens=.*give how many")
    refused(lambda: chat.rewind(turns=wrong), "^turns=.*give how many")
    refused(lambda: plain.rewind(tokens=None), "needs tokens= or turns=")
    assert [(x.ids, x.messages) for x in (plain, chat)] == was
    plain.rewind(tokens=1)
    chat.rewind(turns=1)
    for each in (plain, chat):
        each.close()


@pytest.mark.parametrize("wrong", [b"x", 5, None, ["x"], [], {}, {"content": "x"}, {"role": 5, "content": "x"}])
def test_what_is_no_message_is_not_sent(wrong: Any, store: ConversationStore) -> None:
    chat = store.open("chat")
    chat.send("Who?", tokenizer=Tokenizer(), **GREEDY)
    was = list(chat.messages)
    refused(lambda: chat.send(wrong, tokenizer=Tokenizer(), **GREEDY), "^message=.*a string, or a mapping with a role")
    assert chat.messages == was
    chat.send({"role": "tool", "content": "x"}, tokenizer=Tokenizer(), **GREEDY)
    assert chat.messages[-2] == {"role": "tool", "content": "x"}
    chat.close()


@pytest.mark.parametrize("ids", [torch.tensor(5), torch.tensor([1, 2]), torch.ones(2, 3, dtype=torch.long)])
def test_a_conversation_is_given_one_row(ids: torch.Tensor, store: ConversationStore) -> None:
    chat = store.open("one row")
    refused(lambda: chat.generate(ids, **GREEDY), "one row")
    assert chat.ids == []


def test_an_eviction_policy_that_is_none_is_refused_with_public_names() -> None:
    refused(lambda: store_of(tiny_model("llama"), eviction="x"), r"Give a kvtier\.EvictionPolicy, or one of 'adaptive'")


@pytest.mark.parametrize("option", ["device_budget", "host_budget", "policy", "audit"])
def test_an_option_of_a_memory_that_is_given_is_refused_by_its_name(option: str) -> None:
    value = {"policy": "all-fetch", "audit": "full"}.get(option, "1MiB")
    with TieredMemory(host_budget="1MiB") as memory:
        refused(
            lambda: ConversationStore(tiny_model("llama"), memory=memory, **{option: value}), f"{option}: the store"
        )
    refused(lambda: ConversationStore(tiny_model("llama"), memory=5), "memory=5 is not .* the store then has")
