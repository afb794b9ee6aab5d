"""`kvtier chat`: what was said is there again, and whatever is wrong is a sentence."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pty
import re
import select
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from kvtier import ConversationStore
from kvtier.cli.chat import command, screen
from kvtier.cli.chat.screen import Answer, Stop
from kvtier.cli.main import main
from kvtier.conversation.disk.files.folder import MANIFEST
from kvtier.conversation.disk.tools.contents import contents
from kvtier.hf.models.checkpoint import loading

ROOT = Path(__file__).resolve().parents[2]
PYLM = str(ROOT / "examples" / "pylm")
STATUS = re.compile(r"\[([\d,]+) cached · ([\d,]+) loaded · ([\d,]+) computed(.*)\]")


class Talk:
    """Runs the command with lines on stdin, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capsys = monkeypatch, capsys
        self.status, self.out, self.err = 0, "", ""

    def __call__(self, *args: str, lines: str = "", model: str = PYLM) -> list[tuple[int, int, int]]:
        """Gives of each answer the tokens that were cached, loaded, computed."""
        self.patch.setattr(sys, "stdin", io.StringIO(lines))
        try:
            self.status = main(["chat", model, *args])
        except SystemExit as exit:
            self.status = int(exit.code or 0)
        self.out, self.err = self.capsys.readouterr()
        assert "Traceback" not in self.err
        return [tuple(int(x.replace(",", "")) for x in found[:3]) for found in STATUS.findall(self.err)]  # type: ignore[misc]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    return Talk(monkeypatch, capsys)


def pylm() -> Any:
    return AutoModelForCausalLM.from_pretrained(PYLM, dtype=torch.float32)


def history(folder: Path, name: str = "chat") -> list[str]:
    return [x["content"] for x in contents(folder).conversations[name]["messages"]]


def test_a_later_process_goes_on_and_computes_the_new_message_only(talk: Talk, tmp_path: Path) -> None:
    few = ("--store", str(tmp_path), "--max-new-tokens", "8")
    assert talk(*few, lines="def first(items):\n") == [(0, 0, 5)]
    answer = talk.out.removesuffix("\n")
    assert talk.status == 0
    assert history(tmp_path) == ["def first(items):", answer]
    ((cached, loaded, computed),) = talk(*few, lines="x = 1\n")
    assert "chat: 1 turn, 13 tokens" in talk.err
    assert cached == 0
    assert loaded > 5
    assert computed < 8
    # The same with `generate`, and nothing that is kept.
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(PYLM, dtype=torch.float32),
        AutoTokenizer.from_pretrained(PYLM),
    )
    ids = tokenizer(f"def first(items):{answer}x = 1", return_tensors="pt").input_ids
    assert loaded + computed == ids.shape[1]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == talk.out.removesuffix("\n")


def test_commands_regenerate_fork_rewind_and_switch(talk: Talk, tmp_path: Path) -> None:
    lines = "a = 1\n/regenerate\n/fork other\n//b\n/rewind\n/rewind 5\n/rewind x\n/open chat\n/name\n/list\n/fork\n"
    lines += "/nonsense\n/history\n/stats\n/help\n/open new\n/regenerate\n/quit\nnever\n"
    found = talk("--store", str(tmp_path), "--max-new-tokens", "6", lines=lines)
    assert len(found) == 3
    assert found[1][2] == 1, "all but the last token of the prompt is there"
    for said in (
        "The same answer again",
        "other: 1 turn,",
        "turns=5: the conversation has 1",
        "/rewind takes a number",
        "* chat, 1 turn",
        "  other, 1 turn",
        "/fork takes a name",
        "There is no /nonsense",
        "user: a = 1",
        "in memory",
        "/regenerate       another",
        "There is no answer to generate again",
    ):
        assert said in talk.err, said
    assert history(tmp_path, "other") == history(tmp_path)
    assert set(contents(tmp_path).conversations) == {"chat", "other"}, "one in which nothing was said is saved"
    talk("--store", str(tmp_path), "--list")
    assert talk.out.splitlines()[1].startswith("chat ")


def test_conversations_of_tenants_are_listed_and_stay_closed(talk: Talk, tmp_path: Path) -> None:
    with ConversationStore(pylm(), directory=tmp_path) as store:
        ids = torch.tensor([[5, 6, 7]])
        store.open("theirs", salt="tenant").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
        store.open("by hand").messages = [{"content": "x"}]
    talk("--store", str(tmp_path), "--max-new-tokens", "2", lines="x\n/list\n")
    assert "  theirs: Conversation 'theirs' has another salt" in talk.err
    assert "  by hand, 0 turns" in talk.err
    assert "* chat, 1 turn" in talk.err


def test_a_system_prompt_begins_new_conversations_and_no_others(talk: Talk, tmp_path: Path) -> None:
    few = ("--store", str(tmp_path), "--max-new-tokens", "2", "--name", "a", "--system", "import os\n")
    talk(*few, lines="x\n/open b\ny\n")
    for name, text in (("a", "x"), ("b", "y")):
        state = contents(tmp_path).conversations[name]["messages"]
        assert state[0] == {"role": "system", "content": "import os\n"}
        assert state[1]["content"] == text
    talk(*few, lines="z\n")
    assert talk.status == 0
    talk(*few[:-1], "import re\n", lines="z\n")
    assert talk.status == 2
    assert "has begun without this system prompt" in talk.err


def test_a_model_that_asks_for_beams_answers_with_one(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several there is nothing to show until the end: `generate` refuses a streamer."""
    own, loaded = loading.model_of, list[Any]()

    def model_of(*args: Any) -> Any:
        loaded.append(own(*args))
        loaded[0].generation_config.num_beams = 3
        return loaded[0]

    monkeypatch.setattr(loading, "model_of", model_of)
    assert len(talk("--max-new-tokens", "3", lines="a = 1\n")) == 1
    assert (talk.status, len(loaded)) == (0, 1)


def test_a_chat_that_is_longer_than_the_model_was_made_for_says_so(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    own = loading.model_of

    def model_of(*args: Any) -> Any:
        model = own(*args)
        model.config.max_position_embeddings = 12
        return model

    monkeypatch.setattr(loading, "model_of", model_of)
    lines = "def first(items):\n/rewind\nx\n"
    assert len(talk("--no-store", "--max-new-tokens", "8", lines=lines)) == 2
    assert talk.err.count("These are 13 tokens, and the model was made for 12:") == 1
    assert talk.err.count("the model was made for") == 1, "of the short one nothing"


def test_an_answer_ends_with_the_table_of_positions(talk: Talk, tmp_path: Path) -> None:
    """Beyond it a forward fails, and on CUDA every later one, too."""
    tokenizer = AutoTokenizer.from_pretrained(PYLM)
    torch.manual_seed(0)
    small = GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=12, vocab_size=len(tokenizer), eos_token_id=None)
    GPT2LMHeadModel(small).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lines = "def first(items):\nx\n/rewind\nx = 1\n"
    (_, _, computed), _ = talk("--max-new-tokens", "40", lines=lines, model=str(tmp_path))
    assert computed == 5
    assert talk.err.count("· the model has 12 positions]") == 2
    assert talk.err.count("tokens with this message, and the model has 12 positions: /rewind") == 1
    assert "may make no sense" not in talk.err
    assert talk.status == 2, "a line was not answered"


@pytest.mark.parametrize("no_store", [[], ["--no-store"]])
def test_without_a_store_nothing_is_written(
    no_store: list[str], talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk(*no_store, "--max-new-tokens", "2", "--temperature", "0.9", "--top-p", "0.9", "--seed", "1", lines="x\n")
    assert talk.status == 0
    assert list(tmp_path.iterdir()) == []


def test_a_seed_gives_the_same_answers_again(talk: Talk) -> None:
    said = set()
    for seed in ("1", "1", "2"):
        talk("--no-store", "--max-new-tokens", "20", "--temperature", "1.5", "--seed", seed, lines="x\n/regenerate\n")
        said.add(talk.out)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--store", "FILE"], "cannot be used"),
        (["--store", "DIR", "--list"], "not a folder of saved sequences"),
        (["--no-store", "--list"], "give --store"),
        (["--no-store", "--disk-budget", "1GiB"], "give --store"),
        (["--disk-budget", "1GiB"], "give --store"),
        (["--store", "DIR", "--disk-budget", "50%"], "--disk-budget='50%' is not a positive number of bytes"),
        (["--no-store", "--dtype", "int8"], "no floating-point dtype"),
        (["--no-store", "--dtype", "nonsense"], "no floating-point dtype"),
        (["--no-store", "--device", "nonsense"], "--device nonsense"),
        (["--no-store", "--host-budget", "3x"], "--host-budget='3x' is not a size"),
        (["--no-store", "--temperature", "-1"], "give 0 or more"),
        (["--no-store", "--temperature", "nan"], "give 0 or more"),
        (["--no-store", "--top-p", "2"], "a share above 0"),
        (["--no-store", "--top-p", "0.5", "--temperature", "0"], "does not sample"),
        (["--no-store", "--name", ""], "a name that is not empty"),
        (["--no-store", "--max-new-tokens", "0"], "not a positive number"),
        (["--no-store", "--seed", str(2**64)], "at most 64 bits"),
        (["--no-store", "--seed", str(-(2**63) - 1)], "at most 64 bits"),
        (["--store", "DIR", "--no-store"], "not allowed with"),
        (["--chat-template-kwargs", "{"], "is no object in JSON"),
        (["--chat-template-kwargs", "[1]"], "is no object in JSON"),
        (["--chat-template-kwargs", '{"enable_thinking": false}', "--store", "DIR"], "has no chat template"),
    ],
)
def test_what_is_wrong_is_a_sentence(talk: Talk, args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = {"FILE": str(tmp_path / "file"), "DIR": str(tmp_path / "dir")}
    talk(*[places.get(x, x) for x in args], lines="x\n")
    assert talk.status == 2
    assert said in talk.err
    assert talk.out == ""
    assert not (tmp_path / "dir").exists()


def test_what_the_template_reads_is_given_to_it(talk: Talk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PYLM)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    monkeypatch.setattr(loading, "tokenizer_of", lambda name: tokenizer)
    given = ("--chat-template-kwargs", '{"mood": "class A:"}', "--max-new-tokens", "1")
    talk(*given, "--store", str(tmp_path), lines="x\n")
    assert talk.status == 0
    with ConversationStore(pylm(), directory=tmp_path) as store:
        assert tokenizer.decode(store.open("chat").ids).startswith("xclass A:")


def test_a_model_that_is_none_and_a_folder_of_another_are_sentences(talk: Talk, tmp_path: Path) -> None:
    for name in ("/no/such/folder", str(tmp_path)):
        talk("--store", str(tmp_path / "chats"), model=name)
        assert talk.status == 2
        assert len(talk.err.splitlines()) == 1
    assert not (tmp_path / "chats").exists(), "a wrong name makes no folder"
    talk("--store", str(tmp_path / "chats"), "--max-new-tokens", "1", lines="x\n")
    talk("--store", str(tmp_path / "chats"), "--dtype", "bfloat16", lines="x\n")
    assert talk.status == 2
    assert "was saved with another dtype" in talk.err
    with ConversationStore(pylm(), directory=tmp_path / "chats"):
        talk("--store", str(tmp_path / "chats"), lines="x\n")
    assert talk.status == 2
    assert "is open in another store or process" in talk.err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", None),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_a_damaged_file_of_a_model_is_a_sentence(talk: Talk, file: str, content: bytes | None, tmp_path: Path) -> None:
    for each in Path(PYLM).glob("*.json"):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    weights = (Path(PYLM) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / file).write_bytes(weights[: len(weights) // 2] if content is None else content)
    talk("--no-store", model=str(tmp_path))
    assert talk.status == 2
    assert "cannot be loaded" in talk.err
    assert len(talk.err.splitlines()) == 1


def test_a_folder_without_a_tokenizer_is_a_whole_sentence(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(PYLM) / "config.json").read_bytes())
    talk("--no-store", model=str(tmp_path))
    assert (talk.status, len(talk.err.splitlines())) == (2, 1)
    assert "one of: (1) a `tokenizers` library serialization file, (2)" in talk.err


def test_what_fails_in_an_answer_is_said_and_the_next_one_comes(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, errors = ConversationStore.generate_turn, [RuntimeError("out of luck"), KeyboardInterrupt()]

    def fails(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return generate(*args, **options)

    monkeypatch.setattr(ConversationStore, "generate_turn", fails)
    assert len(talk("--store", str(tmp_path), "--max-new-tokens", "2", lines="x\ny\nz\n")) == 1
    assert "RuntimeError: out of luck" in talk.err
    assert "interrupted: the conversation is as it was" in talk.err
    assert history(tmp_path)[0] == "z"
    assert talk.status == 2


def test_where_nobody_reads_the_answers_no_other_line_is_answered(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def nobody_reads(*_: Any) -> None:
        asked.append(1)
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(Answer, "put", nobody_reads)
    talk("--no-store", lines="x\ny\nz\n")
    assert asked == [1]
    assert "no answer" not in talk.err


def test_bytes_that_are_no_text_are_no_message(talk: Talk) -> None:
    assert len(talk("--no-store", "--max-new-tokens", "1", lines="x\udcff\nx\n")) == 1
    assert "That is no text" in talk.err
    assert talk.status == 2, "a line was not answered"


def test_a_pipe_sees_by_the_status_that_a_line_was_not_answered(talk: Talk, tmp_path: Path) -> None:
    small = ("--no-store", "--max-new-tokens", "2", "--host-budget", "10KiB")
    talk(*small, lines="def first(items):\n")
    assert talk.status == 2
    assert "kvtier: --host-budget is 10240 bytes" in talk.err
    assert "Give --host-budget=1048576 or more.\n" in talk.err, "as it can be typed"
    talk("--store", str(tmp_path), "--max-new-tokens", "2", lines="x\n/fork chat\ny\n")
    assert talk.status == 2
    assert len(history(tmp_path)) == 4, "the lines behind it are answered"
    talk("--no-store", lines="/etc/hosts has an error: where?\n")
    assert (talk.status, "There is no /etc/hosts" in talk.err) == (2, True)


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed(Answer):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.times) == 5:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command, "Answer", Pressed)
    talk("--store", str(tmp_path), "--max-new-tokens", "400", lines="def first(items):\n/regenerate\n")
    assert talk.status == 0
    assert talk.err.count("· stopped]") == 2
    assert history(tmp_path)[1] == talk.out[: len(talk.out) // 2].removesuffix("\n")
    assert signal.getsignal(signal.SIGINT) is before
    stop = Stop()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_warnings_are_as_they_were_afterwards(talk: Talk) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    talk("--no-store", lines="")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("text", ["naïve café 🦜🦜 ok", "\n\n  a\n b", "日本語のテキスト", "plain"])
def test_pieces_of_an_answer_come_to_the_answer(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PYLM)
    ids = tokenizer(text).input_ids
    assert len(ids) > 1
    answer = Answer(tokenizer)
    answer.put(torch.zeros(1, 3, dtype=torch.long))
    for token in ids:
        answer.put(torch.tensor([token]))
    answer.end()
    assert capsys.readouterr().out == tokenizer.decode(ids)


def test_spaces_before_words_come_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Pieces:  # as of SentencePiece: the first word has no space before it
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join("abcd"[x] for x in ids)

    answer = Answer(Pieces())
    answer.put(torch.tensor([[1]]))
    for token in (0, 1, 2, 3):
        answer.put(torch.tensor([token]))
    assert capsys.readouterr().out == "a b c d"


def test_what_a_rewound_conversation_still_says_is_not_removed(talk: Talk, tmp_path: Path) -> None:
    talk("--store", str(tmp_path), "--max-new-tokens", "6", lines="a = 1\nb = 2\n/rewind\n")
    state = contents(tmp_path).conversations["chat"]
    assert len(state["messages"]) == 2
    assert len(state["ids"]) == dict(state["ends"])[2] > 6
    assert main(["store", "gc", str(tmp_path)]) == 0
    ((_, loaded, computed),) = talk("--store", str(tmp_path), "--max-new-tokens", "2", lines="c = 3\n")
    assert loaded > computed


def test_leaving_a_damaged_conversation_removes_nothing_of_what_is_kept_aside(talk: Talk, tmp_path: Path) -> None:
    talk("--store", str(tmp_path), "--max-new-tokens", "2", lines="a = 1\n")
    with contextlib.closing(sqlite3.connect(tmp_path / MANIFEST)) as db, db:
        assert db.execute("UPDATE conversations SET state = replace(state, 'used', 'uxed')").rowcount == 1
    talk("--store", str(tmp_path), lines="/open other\n")
    assert "conversation 'chat' is damaged: nothing of it is left" in talk.err, "it looks as if it were new"
    assert ["kept aside" in x.why for x in contents(tmp_path).damage] == [True]


def test_a_conversation_in_which_nothing_was_said_needs_no_name_where_a_fork_goes_on(
    talk: Talk, tmp_path: Path
) -> None:
    talk("--store", str(tmp_path), lines="/fork a\n/fork b\n")
    assert not contents(tmp_path).conversations


def test_an_answer_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answer = Answer(Evil())
    answer.put(torch.tensor([[1]]))
    for x in "\x1b[2Jgone\x9b\u202e\n":
        answer.put(torch.tensor([ord(x)]))
    assert capsys.readouterr().out == "\\x1b[2Jgone\\x9b\\u202e\n"


def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen.say("a")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen.say("b")
    monkeypatch.setenv("NO_COLOR", "1")
    screen.say("c")
    assert capsys.readouterr().err == "a\n\x1b[2mb\x1b[0m\nc\n"


# A terminal


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.rest = b""
        self.process, self.handle = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background ignore it
            os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
            os.execv(sys.executable, [sys.executable, "-m", "kvtier", "chat", PYLM, *args])

    def type(self, keys: str) -> None:
        os.write(self.handle, keys.encode())

    def until(self, text: str, seconds: float = 120) -> str:
        """What the screen shows, up to a text. The rest is for the next call."""
        shown, end = self.rest, time.monotonic() + seconds
        while text.encode() not in shown and time.monotonic() < end:
            if select.select([self.handle], [], [], 0.1)[0]:
                try:
                    shown += os.read(self.handle, 65536)
                except OSError:  # it has ended
                    break
        before, found, self.rest = shown.partition(text.encode())
        assert found, shown
        return (before + found).decode(errors="replace")

    def end(self, seconds: float = 120) -> int:
        """How it ended."""
        end = time.monotonic() + seconds
        while (found := os.waitpid(self.process, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < end, "it goes on"
            time.sleep(0.05)
        os.close(self.handle)
        return os.waitstatus_to_exitcode(found[1])


@pytest.mark.slow
def test_in_a_terminal_a_kill_leaves_the_last_whole_turn(tmp_path: Path) -> None:
    long = ("--store", str(tmp_path), "--max-new-tokens", "3000")
    first = Terminal("--store", str(tmp_path), "--max-new-tokens", "8")
    first.until("chat> ")
    first.type("def firzz\x7f\x7fst(items):\n")
    first.until("tokens/s]")
    first.until("chat> ")
    first.type("class A:\n")
    first.until("tokens/s]")
    first.until("chat> ")
    first.type("\x04")
    assert first.end() == 0
    whole = history(tmp_path)
    assert whole[0] == "def first(items):"

    second = Terminal(*long)
    assert "chat: 2 turns" in second.until("chat> ")
    second.type("def last(items):\n")
    second.until("\n    ")
    os.kill(second.process, signal.SIGKILL)
    assert second.end() == -signal.SIGKILL
    assert history(tmp_path) == whole

    third = Terminal(*long)
    assert "chat: 2 turns" in third.until("chat> ")
    third.type("def last(items):\n")
    third.until("\n    ")
    third.type("\x03")
    status = third.until("stopped]")
    assert int(STATUS.search(status)[2]) > 0  # type: ignore[index]
    third.until("chat> ")
    third.type("/history\n")
    assert "user: def last(items):" in third.until("chat> ")
    third.type("abc")
    third.until("abc")
    time.sleep(0.5)  # Python's line editor misses an interrupt that comes between a letter and its next wait
    third.type("\x03")
    assert third.end() == 0
    assert history(tmp_path)[:5] == [*whole, "def last(items):"]
