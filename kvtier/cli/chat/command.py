"""`kvtier chat`: a conversation in the terminal that is there again tomorrow."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier.cli.arguments import names_and_values, positive
from kvtier.cli.chat import remote
from kvtier.cli.chat.lines import Loop
from kvtier.cli.chat.screen import Answer, Stop, say
from kvtier.cli.config import read_config
from kvtier.cli.store import count, ls, plain, turns_of
from kvtier.config import format_size, parse_bytes, parse_size
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.conversation.conversation import Conversation
    from kvtier.conversation.store import ConversationStore

_EXAMPLES = """\
examples:
  kvtier chat Qwen/Qwen3-0.6B --store chats                  # goes on where it was left
  kvtier chat Qwen/Qwen3-0.6B --store chats --name french --system "Answer in French."
  echo "What is paged attention?" | kvtier chat Qwen/Qwen3-0.6B
  kvtier chat --url http://127.0.0.1:8000                    # with a server, such as kvtier serve

Ctrl-C stops an answer and keeps what was said of it; pressed again, it forgets the answer. At the prompt, Ctrl-C and
Ctrl-D leave. What was said is saved at the end of every answer.

exit status: 0; 2: an error, also one behind a line that came through a pipe; 130: Ctrl-C before the first line
"""

_COMMANDS = """\
/regenerate       another answer to the last message
/rewind [N]       forget the last N messages and their answers (1)
/fork NAME        another conversation with the same history, and go on there
/open NAME        go on with another conversation, made where there is none
/name             the name of this conversation
/history          what was said
/list             all conversations
/stats            what is kept, and where
/quit             leave; so do Ctrl-C and Ctrl-D
//...             a message that begins with a slash
Behind each answer: tokens of the prompt that were in memory (cached), read from the disk (loaded), and computed."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model, and go on later",
        description="Talk to a model. A conversation has a name, and a later process goes on with it without computing "
        "its history again.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, or a name on the model hub")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--store",
        metavar="DIR",
        help="where conversations are saved; made if it is missing (nowhere: they end with the program)",
    )
    where.add_argument("--no-store", action="store_true", help="save nothing, as without --store")
    where.add_argument(
        "--url", help="talk to a server of OpenAI's interface; its key is in KVTIER_API_KEY or OPENAI_API_KEY"
    )
    parser.add_argument("--name", default="chat", help="of the conversation (chat)")
    parser.add_argument("--list", action="store_true", help="list the conversations of the store, and leave")
    parser.add_argument("--system", metavar="TEXT", help="the first message of new conversations")
    parser.add_argument(
        "--chat-template-kwargs",
        type=names_and_values,
        metavar="JSON",
        help="what the chat template reads besides messages, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="of an answer, at the most (512)")
    parser.add_argument("--temperature", type=float, help="0: the likeliest token each time (the model's own)")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens of this share (the model's own)")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.add_argument("--device", help="such as cuda:1 or cpu (a GPU, if there is one)")
    parser.add_argument(
        "--dtype", help="of weights, keys and values, such as bfloat16 (what the model is saved in; on the CPU float32)"
    )
    parser.add_argument("--device-budget", help="device memory for keys and values, such as 4GiB (what there is)")
    parser.add_argument("--host-budget", help="host memory for them, such as 64GiB (what there is)")
    parser.add_argument("--disk-budget", help="bytes of the store, such as 500GiB (no limit)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    if args.list:
        if args.store is None:
            raise ConfigError("--list is of a store: give --store DIR.")
        return ls(argparse.Namespace(directory=args.store, json=False))
    if args.store is None and args.disk_budget is not None:
        raise ConfigError("--disk-budget is of a store: give --store DIR.")
    if not args.name:
        raise ConfigError("--name: a conversation has a name that is not empty.")
    options = generate_options(args)
    if args.url is not None:
        return remote.run(args, options)
    if args.model is None:
        raise ConfigError("Give a MODEL, or --url of a server.")
    check_budgets(args)
    from kvtier.conversation.disk.files.folder import Folder
    from kvtier.conversation.given.prompts import Prompts
    from kvtier.hf.models.checkpoint.loading import model_of, quiet, tokenizer_of

    with quiet():
        read_config(args.model, loaded=True)  # its errors say what is not there
        tokenizer = tokenizer_of(args.model)
        Prompts(tokenizer, None, args.chat_template_kwargs)  # what it does not read is said before weights are read
        if args.store is not None:
            Folder(args.store).close()  # the same
        model = model_of(args.model, args.dtype, args.device)
        if args.seed is not None:
            import torch

            torch.manual_seed(args.seed)
        from kvtier.conversation.store import ConversationStore

        if args.store is None and not args.no_store and sys.stdin.isatty():
            say("What is said is not saved: --store DIR keeps conversations.")
        budgets = {"device_budget": args.device_budget, "host_budget": args.host_budget}
        store = ConversationStore(model, directory=args.store, disk_budget=args.disk_budget, **budgets)
        try:
            options["chat_template_kwargs"] = args.chat_template_kwargs
            loop = ChatLoop(store, tokenizer, args.name, args.system, options)
            try:
                status = loop.talk()
            finally:
                loop.leave()
        finally:
            store.close()
    return status


def check_budgets(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a budget that is no size, before weights are read."""
    for name, parse in (("device-budget", parse_size), ("host-budget", parse_size), ("disk-budget", parse_bytes)):
        size = getattr(args, name.replace("-", "_"), None)
        if size is not None:
            parse(f"--{name}", size)


def generate_options(args: argparse.Namespace) -> dict[str, Any]:
    """As `generate` takes them.

    Raises:
        ConfigError: a temperature, a share or a seed that is none.
    """
    # One beam, whatever the model's own config asks for: an answer is shown as it comes.
    found: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "num_beams": 1}
    if args.temperature is not None:
        if not 0 <= args.temperature < float("inf"):
            raise ConfigError(f"--temperature {args.temperature}: give 0 or more, such as 0.7.")
        found |= {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    if args.top_p is not None:
        if not 0 < args.top_p <= 1:
            raise ConfigError(f"--top-p {args.top_p}: give a share above 0, at most 1.")
        if args.temperature == 0:
            raise ConfigError("--top-p is of sampling, and --temperature 0 does not sample.")
        found |= {"do_sample": True, "top_p": args.top_p}
    if args.seed is not None and not -(2**63) <= args.seed < 2**64:
        raise ConfigError(f"--seed {args.seed}: give a number of at most 64 bits.")
    return found


class ChatLoop(Loop):
    """Lines are read, and answered.

    Args:
        store: of the conversations.
        tokenizer: of its model.
        name: of the conversation to begin with.
        system: the first message of new conversations; None: they begin with the user's.
        options: of each answer, as `send` takes them.

    Raises:
        ConfigError: the conversation has begun with another system prompt.
    """

    help = _COMMANDS

    def __init__(
        self, store: ConversationStore, tokenizer: Any, name: str, system: str | None, options: dict[str, Any]
    ) -> None:
        from kvtier.hf.models.positions import count_of_positions, table_of_positions

        super().__init__()
        self.store = store
        self.tokenizer = tokenizer
        self.system = system
        self.options = options
        self._positions, self._table = count_of_positions(store.model), table_of_positions(store.model)
        self._problem = ""
        self._made = set[str]()  # names that were free
        self.chat = self._opened(name)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of the conversation."""
        return self.chat.name

    @property
    def messages(self) -> Any:
        """That were said in it."""
        return self.chat.messages

    def leave(self) -> None:
        """Leave the conversation. One that was made here and in which nothing was said needs no name; of another one
        that says nothing, what is damaged may be kept aside under its name."""
        if self.chat.name in self._made and not self.chat.messages and not self.chat.ids:
            self.chat.close()

    @property
    def commands(self) -> dict[str, Callable[[str], None]]:
        """By name."""
        return super().commands | {
            "/regenerate": self._regenerate,
            "/rewind": self._rewind,
            "/fork": self._fork,
            "/open": self._open,
            "/name": lambda _: say(plain(self.chat.name)),
            "/list": self._list,
            "/stats": self._stats,
        }

    # Answers

    def send(self, text: str) -> None:
        """Say something, and print the answer."""
        first: dict[str, Any] = {} if self.chat.messages or self.system is None else {"system": self.system}
        self._answer(lambda **options: self.chat.send(text, **first, **options))

    def _regenerate(self, _: str) -> None:
        before = self.chat.messages
        self._answer(self.chat.regenerate)
        if self.chat.messages == before:
            say("The same answer again: without sampling it is the likeliest one. --temperature 0.7 gives others.")

    def _answer(self, ask: Callable[..., str]) -> None:
        """Print an answer as it comes, and what it took."""
        answer, stop = Answer(self.tokenizer, self._table), Stop(self._table)
        begun = bool(self.chat.messages)
        try:
            with stop.listening():
                ask(tokenizer=self.tokenizer, streamer=answer, stopping_criteria=[stop], **self.options)
        finally:
            if answer.times:
                print(flush=True)
        reuse = self.chat.reuse
        assert reuse is not None
        why = [reuse.why] if reuse.why and begun else []
        say(answer.status(reuse, " · ".join([*why, *([stop.why] if stop.why else [])])))
        if self._table is None and self._positions is not None and len(self.chat.ids) > self._positions:
            say(
                f"These are {count(len(self.chat.ids), 'token')}, and the model was made for {self._positions:,}: what "
                "it says beyond them may make no sense. /rewind, or /open another conversation."
            )
        self._tell_problem()

    def _tell_problem(self) -> None:
        """Say what went wrong last, once."""
        problem = self.store.stats.problem
        if problem and problem != self._problem:
            say(f"kvtier: {plain(problem)}")
        self._problem = problem

    # Commands

    def _rewind(self, rest: str) -> None:
        if rest and not rest.isdecimal():
            say("/rewind takes a number of messages.")
            return
        self.chat.rewind(turns=int(rest or 1))
        say(self._about(self.chat))

    def _fork(self, name: str) -> None:
        if not name:
            say("/fork takes a name.")
            return
        chat = self.chat.fork(name)
        self.leave()
        self.chat = chat
        self._made.add(name)
        say(self._about(chat))

    def _open(self, name: str) -> None:
        if not name:
            say("/open takes a name.")
            return
        if name != self.chat.name:
            chat = self._opened(name)
            self.leave()
            self.chat = chat

    def _opened(self, name: str) -> Conversation:
        known = name in self.store.names
        chat = self.store.open(name)
        first = chat.messages[0] if chat.messages else {}
        if self.system is not None and first and first != {"role": "system", "content": self.system}:
            raise ConfigError(
                f"Conversation {plain(name)!r} has begun without this system prompt: leave --system away, or give "
                "another --name."
            )
        if not known:
            self._made.add(name)
        if known or sys.stdin.isatty():
            say(self._about(chat))
        self._tell_problem()  # what is damaged of it is not there
        return chat

    def _list(self, _: str) -> None:
        for name in self.store.names:
            try:
                turns = turns_of(vars(self.store.open(name, salt=None)))
            except ConfigError as error:  # of a tenant, or it cannot be read now
                say(f"  {plain(name)}: {plain(str(error))}")
                continue
            say(f"{'*' if name == self.chat.name else ' '} {plain(name)}, {count(turns, 'turn')}")

    def _stats(self, _: str) -> None:
        kept, memory = self.store.stats, self.store.memory.stats
        say(f"{count(kept.sequences, 'sequence')} of {count(kept.tokens, 'token')} in memory")
        say(f"{kept.cached_tokens:,} of {count(kept.prompt_tokens, 'token')} of prompts were there")
        for name, tier in (("device", memory.device), ("host", memory.host)):
            say(f"{name}: {format_size(tier.bytes)}, at most {format_size(tier.budget)}")
        say(f"disk: {format_size(kept.saved_bytes)}, {kept.damaged} damaged")

    def _about(self, chat: Conversation) -> str:
        turns = turns_of(vars(chat))
        about = f"{count(turns, 'turn')}, {count(len(chat.ids), 'token')}" if turns else "new"
        return f"{plain(chat.name)}: {about}"
