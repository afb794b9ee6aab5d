"""One conversation: who goes on with it while another call does, and what is saved of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from families import tiny_model
from test_store import GREEDY, Tokenizer, fresh, ones, some_ids, store_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvtier import ConcurrentUseError, ConfigError
from kvtier.conversation import conversation
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.given.arguments import text_of

PYLM = Path(__file__).resolve().parents[2] / "examples" / "pylm"


class Within(StoppingCriteria):
    """Does something in the middle of a call, once."""

    def __init__(self, does: Callable[[], object]) -> None:
        self.does: Callable[[], object] | None = does

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if self.does is not None:
            does, self.does = self.does, None
            does()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def within(does: Callable[[], object]) -> dict[str, Any]:
    return {**GREEDY, "stopping_criteria": StoppingCriteriaList([Within(does)])}


# One call at a time


@pytest.mark.parametrize("what", ["send", "regenerate", "rewind"])
def test_whoever_goes_on_while_a_message_is_being_sent_is_refused(what: str) -> None:
    """From the moment at which its messages are read: else one of two turns would be lost without an error."""
    asked, goes_on = threading.Event(), threading.Event()

    class Slow(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
            asked.set()
            assert goes_on.wait(120)
            return super().apply_chat_template(messages, **options)

    with store_of(tiny_model("llama")) as store:
        chat, tokenizer = store.open("alice"), Tokenizer()
        chat.send("first", tokenizer=tokenizer, **GREEDY)
        thread = threading.Thread(target=chat.send, args=("second",), kwargs={"tokenizer": Slow(), **GREEDY})
        thread.start()
        assert asked.wait(120)
        does: dict[str, Callable[[], object]] = {
            "send": lambda: chat.send("third", tokenizer=tokenizer, **GREEDY),
            "regenerate": lambda: chat.regenerate(tokenizer=tokenizer, **GREEDY),
            "rewind": lambda: chat.rewind(turns=1),
        }
        try:
            with pytest.raises(ConcurrentUseError):
                does[what]()
        finally:
            goes_on.set()
            thread.join()
        assert [x["content"] for x in chat.messages if x["role"] == "user"] == ["first", "second"]
        chat.regenerate(tokenizer=tokenizer, **GREEDY)
        assert len(chat.messages) == 4


class Plain(Tokenizer):
    """It has no template."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(x) for x in text.split()]}


def test_a_message_of_no_tokens_is_refused_in_a_sentence() -> None:
    with store_of(tiny_model("llama")) as store:
        chat = store.open("alice")
        with pytest.raises(ConfigError, match="no tokens"):
            chat.send("", tokenizer=Plain(), **GREEDY)
        assert chat.messages == []


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=str)
def test_a_message_that_only_calls_tools_says_nothing_without_a_template(content: dict[str, Any]) -> None:
    with store_of(tiny_model("llama")) as store:
        chat = store.open("alice")
        chat.messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "tool_calls": [CALL], **content}]
        answer = [{"type": "text", "text": " three "}, {"type": "text", "text": "four"}]
        chat.send({"role": "tool", "content": answer}, tokenizer=Plain(), **GREEDY)
        assert chat.ids[:4] == [3, 3, 5, 4]
        assert len(chat.messages) == 4


def test_a_tokenizer_that_has_no_template_and_writes_chats_by_code_of_its_own_does() -> None:
    """As that of mistral-common: joined contents would be no chat, and nobody would hear of it."""

    class Own(PreTrainedTokenizerBase):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            return {"input_ids": Tokenizer().apply_chat_template(conversation, **options)}

        def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
            return Tokenizer().decode(token_ids)

    with store_of(tiny_model("llama")) as store:
        chat, own = store.open("alice"), Own()
        assert not own.chat_template
        chat.send("Who are you?", tokenizer=own, **GREEDY)
        assert chat.ids[:-6] == Tokenizer().apply_chat_template(chat.messages[:1])


class OfImages(ProcessorMixin):
    """A processor, as far as a chat could use one: it gives a batch, and of that the ids alone."""

    chat_template = "yes"

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()

    def apply_chat_template(self, conversation: Any, **_: Any) -> Any:
        return [self.tokenizer.apply_chat_template(conversation)]


@pytest.mark.parametrize("with_template", [True, False])
def test_a_processor_is_refused_with_what_to_give(with_template: bool) -> None:
    processor = OfImages()
    if not with_template:
        processor.chat_template = None
    with store_of(tiny_model("llama")) as store:
        chat = store.open("alice")
        for more in ({}, {"tools": [{"name": "look_up"}]}, {"chat_template_kwargs": {"enable_thinking": False}}):
            with pytest.raises(ConfigError, match=r"processor\.tokenizer"):
                chat.send("Who are you?", tokenizer=processor, **more, **GREEDY)
        assert chat.messages == []
        assert chat.send("Who are you?", tokenizer=processor.tokenizer, **GREEDY)


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "input_audio"])
def test_a_picture_in_a_message_is_not_left_out_in_silence(kind: str) -> None:
    class Parts(Tokenizer):
        def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
            parts = [x["content"] if isinstance(x["content"], list) else [{"text": x["content"]}] for x in messages]
            joined = [{"content": "".join(y.get("text", "<image>") for y in x)} for x in parts]
            return super().apply_chat_template(joined)

    text = {"type": "text", "text": "What is this?"}
    with store_of(tiny_model("llama")) as store:
        chat, tokenizer = store.open("alice"), Parts()
        with pytest.raises(ConfigError, match=f"type '{kind}'"):
            chat.send({"role": "user", "content": [{"type": kind}, text]}, tokenizer=tokenizer, **GREEDY)
        with pytest.raises(ConfigError, match=f"type '{kind}'"):  # templates know it by its key, too
            chat.send({"role": "user", "content": ({kind: "somewhere"}, text)}, tokenizer=tokenizer, **GREEDY)
        assert chat.messages == []
        assert chat.send({"role": "user", "content": [text]}, tokenizer=tokenizer, **GREEDY)


def test_a_chat_whose_template_changes_earlier_turns_is_rewound_to_tokens_of_what_is_left() -> None:
    """Templates of models that reason drop the thoughts of earlier answers."""

    class Forgetful(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
            last = max(i for i, message in enumerate(messages) if message["role"] == "user")
            short = [x | {"content": ""} if x["role"] == "assistant" else x for x in messages[:last]]
            return super().apply_chat_template([*short, *messages[last:]], **options)

    with store_of(tiny_model("llama")) as store:
        chat, tokenizer = store.open("alice"), Forgetful()
        chat.send("hi", tokenizer=tokenizer, do_sample=False, max_new_tokens=20)
        chat.send("abc", tokenizer=tokenizer, do_sample=False, max_new_tokens=2)
        chat.rewind(turns=1)
        assert len(chat.messages) == 2
        left = tokenizer.apply_chat_template(chat.messages)
        assert chat.ids == left[: len(chat.ids)], "tokens of the message that was forgotten"
        assert len(chat.ids) >= 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_chat_whose_answer_is_tokenised_otherwise_is_rewound_to_the_end_of_that(fails: bool) -> None:
    """It was generated as one token for each letter, and letters of one message are taken two at a time when read."""

    class Pairs(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
            if fails and not options["add_generation_prompt"]:
                raise RuntimeError("a template that wants the user to be last")
            pairs = [x | {"content": x["content"][::2]} if x["role"] == "assistant" else x for x in messages]
            return super().apply_chat_template(pairs, **options)

    with store_of(tiny_model("llama")) as store:
        chat, tokenizer = store.open("alice"), Pairs()
        chat.send("hi", tokenizer=tokenizer, do_sample=False, max_new_tokens=20)
        chat.send("abc", tokenizer=tokenizer, do_sample=False, max_new_tokens=2)
        chat.rewind(turns=1)
        left = tokenizer.apply_chat_template(chat.messages, add_generation_prompt=True)
        assert len(left) == 4 + 12
        assert chat.ids == (left[:4] if fails else left)


def test_an_answer_that_fails_leaves_the_messages_that_were() -> None:
    def fails() -> None:
        raise RuntimeError("no power")

    with store_of(tiny_model("llama")) as store:
        chat, tokenizer = store.open("alice"), Tokenizer()
        chat.send("first", tokenizer=tokenizer, **GREEDY)
        before, ids = list(chat.messages), list(chat.ids)
        for ask in (chat.regenerate, lambda **options: chat.send("second", **options)):
            with pytest.raises(RuntimeError, match="no power"):
                ask(tokenizer=tokenizer, **within(fails))
            assert (chat.messages, chat.ids) == (before, ids)
        chat.rewind(turns=1)
        assert not chat.messages


def test_several_answers_are_refused_whichever_config_asks_for_them() -> None:
    with store_of(tiny_model("llama")) as store:
        chat = store.open("a")
        for options in (
            {"num_return_sequences": 2},
            {"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=2)},
        ):
            with pytest.raises(ConfigError, match="one answer"):
                chat.generate(**ones(some_ids(9)), **options)


def test_a_generation_config_may_come_second_as_of_a_models_generate() -> None:
    model, ids, config = tiny_model("llama"), some_ids(9), GenerationConfig(max_new_tokens=3, do_sample=False)
    with store_of(model) as store:
        out = store.open("a").generate(ids, config)
        assert torch.equal(out, model.generate(ids, config))
        assert out.shape[1] == 12
        with pytest.raises(ConfigError, match="one answer"):
            store.open("a").generate(ids, GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=2))


def test_what_is_generated_within_a_turn_is_not_that_conversation() -> None:
    """Where the turn then fails, what is pinned of the conversation is what it had before."""
    model, mine, other = tiny_model("llama"), some_ids(40), some_ids(30, seed=5)

    def fails() -> None:
        store.generate(**ones(other), **GREEDY)
        raise RuntimeError("no power")

    with store_of(model) as store:
        chat = store.open("a", pinned=True)
        chat.generate(**ones(mine), **GREEDY)

        def pinned() -> list[int]:
            return sorted(x.sequence.pinned for x in store.kept.entries.values())

        assert pinned() == [45]
        with pytest.raises(RuntimeError, match="no power"):
            chat.generate(**ones(torch.cat([mine, mine], 1)), **within(fails))
        assert pinned()[:-1] == [0] * (len(pinned()) - 1)
        assert pinned()[-1] >= 40
        store.check_integrity()


@pytest.mark.parametrize("masked", [False, True], ids=["inferred", "mask"])
def test_padding_is_no_part_of_a_history(masked: bool) -> None:
    """What is pinned is found by the tokens that are kept."""
    model, ids = tiny_model("llama"), some_ids(40)
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.long), ids], 1)
    mask = {"attention_mask": (padded != 0).long()} if masked else {}
    with store_of(model) as store:
        chat = store.open("a", pinned=True)
        out = chat.generate(padded, pad_token_id=0, **mask, **GREEDY)
        assert chat.ids == out[0, 8:].tolist()
        assert [x.sequence.pinned for x in store.kept.entries.values()] == [45]
        chat.generate(**ones(torch.tensor([[*chat.ids, 3]])), **GREEDY)
        assert chat.reuse is not None
        assert chat.reuse.cached == 45


# Closed meanwhile


@pytest.mark.parametrize("saved", [False, True])
def test_a_conversation_that_is_closed_in_the_middle_of_its_turn_stays_forgotten(saved: bool, tmp_path: Path) -> None:
    model, inputs = tiny_model("llama"), ones(some_ids(40))
    options = {"directory": tmp_path} if saved else {}
    with store_of(model, **options) as store:
        chat = store.open("a", pinned=True)
        out = chat.generate(**inputs, **within(chat.close))
        assert torch.equal(out, fresh(model, inputs))
        assert store.names == []
        assert not any(x.sequence.pinned for x in store.kept.entries.values()), "nobody could unpin it"
        store.flush()
        store.check_integrity()
    if saved:
        with store_of(model, **options) as store:
            assert store.names == []


def test_a_name_that_is_taken_again_is_that_of_the_new_conversation(tmp_path: Path) -> None:
    model, again = tiny_model("llama"), list[Conversation]()

    def closes() -> None:
        chat.close()
        again.append(store.open("a"))
        again[0].generate(**ones(some_ids(12, seed=3)), **GREEDY)

    with store_of(model, directory=tmp_path) as store:
        chat = store.open("a")
        chat.generate(**ones(some_ids(40)), **within(closes))
        history = again[0].ids
        store.flush()
    with store_of(model, directory=tmp_path) as store:
        assert store.open("a").ids == history


def test_a_name_that_is_taken_again_has_the_rank_of_the_new_conversation_on_nothing_of_the_old_one() -> None:
    again = list[Conversation]()

    def closes() -> None:
        chat.close()
        again.append(store.open("a", pinned=True))

    with store_of(tiny_model("llama")) as store:
        chat = store.open("a", pinned=True)
        chat.generate(**ones(some_ids(40)), **within(closes))
        assert not any(x.sequence.pinned for x in store.kept.entries.values())
        again[0].generate(**ones(some_ids(12, seed=3)), **GREEDY)
        assert sorted(x.sequence.pinned for x in store.kept.entries.values()) == [0, 17]
        store.check_integrity()


def in_another_thread(does: Callable[[], object]) -> BaseException | None:
    """What it raises."""
    found: list[BaseException | None] = [None]

    def run() -> None:
        try:
            does()
        except BaseException as error:
            found[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("what", ["send", "generate", "rewind", "fork"])
def test_a_store_is_not_closed_before_what_a_conversation_is_now_is_saved(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, refused = tiny_model("llama"), list[BaseException | None]()
    with store_of(model, directory=tmp_path) as store:
        chat, changed = store.open("a"), store.conversations.changed
        if what in ("rewind", "fork"):
            chat.generate(**ones(some_ids(20)), **GREEDY)

        def closed_before(*args: Any, **options: Any) -> None:
            refused.append(in_another_thread(store.close))
            changed(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(store.conversations, "changed", closed_before)
            if what == "send":
                chat.send("Who are you?", tokenizer=Tokenizer(), **GREEDY)
            elif what == "generate":
                chat.generate(**ones(some_ids(20)), **GREEDY)
            elif what == "rewind":
                chat.rewind(tokens=5)
            else:
                chat = chat.fork("b")
        ids, messages, name = chat.ids, chat.messages, chat.name
        assert ids
        assert [type(x) for x in refused] == [ConcurrentUseError]
    with store_of(model, directory=tmp_path) as store:
        assert (store.open(name).ids, store.open(name).messages) == (ids, messages)


def test_what_a_call_has_computed_while_a_store_closes_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), some_ids(40)
    store = store_of(model, directory=tmp_path)
    flush = store._flush

    def called_behind() -> list[str]:
        lost = flush()
        assert in_another_thread(lambda: store.generate(**ones(ids), **GREEDY)) is None
        return lost

    monkeypatch.setattr(store, "_flush", called_behind)
    store.close()
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), **GREEDY)
        assert store.reuse[0].loaded == 39


@pytest.mark.parametrize("of_the_model", [False, True])
def test_an_answer_ends_at_a_string_that_a_call_or_the_model_asks_for(of_the_model: bool) -> None:
    """For which `generate` wants the tokenizer, that `send` has."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(PYLM).eval(), AutoTokenizer.from_pretrained(PYLM)
    asked: dict[str, Any] = {**GREEDY, "max_new_tokens": 12}
    with store_of(model) as store:
        whole = store.open("a").send("def first(items):\n", tokenizer=tokenizer, **asked)
        stop = whole[len(whole) // 2 :][:2]
        if of_the_model:
            model.generation_config.stop_strings = [stop]
        else:
            asked["stop_strings"] = [stop]
        answer = store.open("b").send("def first(items):\n", tokenizer=tokenizer, **asked)
        assert whole.startswith(answer)
        assert stop in answer
        assert len(answer) < len(whole)


def test_whoever_changes_a_message_changes_one_conversation_and_no_turn_that_was_said() -> None:
    class Parts(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
            return super().apply_chat_template([{"content": text_of(x)} for x in messages], **options)

    with store_of(tiny_model("llama")) as store:
        chat, message = store.open("a"), {"role": "user", "content": [{"type": "text", "text": "Who"}]}
        chat.send(message, tokenizer=Parts(), **GREEDY)
        fork = chat.fork("b")
        fork.messages[0]["content"][0]["text"] = "Why"
        message["content"].append({"type": "text", "text": " else"})  # type: ignore[attr-defined]
        chat.send(message, tokenizer=Parts(), **GREEDY)
        assert [text_of(x) for x in chat.messages[::2]] == ["Who", "Who else"]


def test_an_answer_that_cannot_be_decoded_leaves_the_conversation_as_it_was() -> None:
    class Fails(Tokenizer):
        def decode(self, ids: torch.Tensor, **_: Any) -> str:
            raise ValueError("no such token")

    with store_of(tiny_model("llama")) as store:
        chat = store.open("a")
        chat.send("Who are you?", tokenizer=Tokenizer(), **GREEDY)
        before = list(chat.ids), list(chat.messages), chat.reuse, chat.used
        with pytest.raises(ValueError, match="no such token"):
            chat.send("Really?", tokenizer=Fails(), **GREEDY)
        assert (chat.ids, chat.messages, chat.reuse, chat.used) == before


def test_a_call_within_another_one_that_computes_otherwise_leaves_the_rank_where_it_is() -> None:
    """A streamer asks the same store under autocast: keys of another dtype, and not what the conversation says."""
    model, ids = tiny_model("llama"), some_ids(40)

    def asks() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            store.generate(**ones(some_ids(20, seed=5)), **GREEDY)

    with store_of(model) as store:
        chat = store.open("a", pinned=True)
        chat.generate(**ones(ids), **within(asks))
        kept = {x.sequence.length: x.sequence.pinned for x in store.kept.entries.values()}
        assert kept == {45: 45, 25: 0}


# What is saved


@pytest.mark.parametrize("salt", [("tenant", 1), b"tenant", 1.5])
def test_a_conversation_whose_salt_no_later_process_knows_is_not_saved(salt: Any, tmp_path: Path) -> None:
    """It would come back under a salt of JSON's, by which nobody could open it."""
    model = tiny_model("llama")
    for _ in range(2):
        with store_of(model, directory=tmp_path) as store:
            assert store.names == []
            store.open("a", salt=salt).generate(**ones(some_ids(40)), **GREEDY)
            store.flush()
            assert not store.stats.problem


def test_a_fork_at_any_line_of_a_turn_has_the_whole_turn_or_nothing_of_it() -> None:
    with store_of(tiny_model("llama")) as store:
        chat, forks = store.open("a"), list[tuple[int, int]]()

        def forking(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code not in (Conversation._send.__code__, Conversation._now.__code__):
                return None
            if event == "line":
                fork = chat.fork(f"fork {len(forks)}")
                forks.append((len(fork.ids), len(fork.messages)))
            return forking

        sys.settrace(forking)
        try:
            chat.send("Who are you?", tokenizer=Tokenizer(), **GREEDY)
        finally:
            sys.settrace(None)
        assert set(forks) == {(0, 0), (len(chat.ids), 2)}


def test_whoever_finds_a_fork_that_is_being_made_finds_its_history() -> None:
    with store_of(tiny_model("llama")) as store:
        chat, found = store.open("a"), list[tuple[int, int] | None]()
        chat.send("Who are you?", tokenizer=Tokenizer(), **GREEDY)

        def finding(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code is not Conversation.fork.__code__:
                return None
            fork = store.find("b")
            found.append(None if fork is None else (len(fork.ids), len(fork.messages)))
            return finding

        sys.settrace(finding)
        try:
            chat.fork("b")
        finally:
            sys.settrace(None)
        assert set(found) == {None, (len(chat.ids), 2)}


@pytest.mark.parametrize("first", ["ids", "messages", "engine", "call"])
def test_what_two_threads_change_of_a_conversation_is_all_there(first: str) -> None:
    """Between any two steps of the interpreter in one, the other does what it does."""
    message = [{"role": "user", "content": "Hello."}]
    with store_of(tiny_model("llama")) as store:
        chat, steps, at = store.open("a"), 0, 0

        def changes(what: str) -> None:
            if what == "ids":
                chat.ids = [1, 2]
            elif what == "messages":
                chat.messages = message
            elif what == "engine":
                chat.went_on([1, 2])
            else:
                chat.generate(torch.tensor([[1]]), max_new_tokens=1)

        def other(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal steps
            if frame.f_code.co_filename != conversation.__file__:
                return None
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            if event == "opcode" and steps == at:
                changes("ids" if first == "messages" else "messages")
            return other

        while steps >= at:
            chat.ids, chat.messages = [], []
            steps, at = 0, at + 1
            sys.settrace(other)
            try:
                changes(first)
            finally:
                sys.settrace(None)
            if steps >= at:
                assert (len(chat.ids), chat.messages) == (2, message), f"step {at}"


@pytest.mark.parametrize("how", ["generate", "send"])
def test_what_a_call_calls_cannot_close_its_store(how: str, tmp_path: Path) -> None:
    refused = list[type]()

    def closes() -> None:
        with pytest.raises(ConcurrentUseError, match="closes it") as error:
            store.close()
        refused.append(error.type)

    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        if how == "generate":
            store.generate(**ones(some_ids(20)), **within(closes))
        else:
            store.open("a").send("Who are you?", tokenizer=Tokenizer(), **within(closes))
        assert refused
        assert store.generate(**ones(some_ids(9)), **GREEDY) is not None
    assert store.closed
