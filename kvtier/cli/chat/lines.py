"""`Loop`: lines from the terminal, each a message or a command."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import with_flags
from kvtier.cli.chat.screen import say
from kvtier.cli.store import messages_of, plain
from kvtier.errors import KVTierError


class Loop:
    """Lines are read, and answered.

    Attributes:
        help: what `/help` says.
        name: of the conversation.
        messages: that were said.
        done: somebody has left.
        failed: lines that ended in an error.
    """

    help = ""
    name: str
    messages: Any

    def __init__(self) -> None:
        self.done = False
        self.failed = 0

    @property
    def commands(self) -> dict[str, Callable[[str], None]]:
        """By name."""
        return {"/help": lambda _: say(self.help), "/history": self._history, "/quit": self._quit}

    def send(self, text: str) -> None:
        """Answer a message."""
        raise NotImplementedError

    def talk(self) -> int:
        """Answer until there are no lines any more, or somebody leaves.

        Returns:
            The exit status: 2 where lines came from a program, which reads no errors, and one of them ended in one.
        """
        asking = sys.stdin.isatty()
        if asking:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # with which `input` has a line editor
            say("/help tells what there is besides talking.")
        while not self.done:
            try:
                if asking and not sys.stdout.isatty():  # answers go elsewhere, and the prompt does not
                    print(self._prompt(), end="", file=sys.stderr, flush=True)
                line = input(self._prompt() if asking and sys.stdout.isatty() else "")
                line.encode()  # a line editor lets bytes that are no text pass
            except (EOFError, KeyboardInterrupt):
                if asking:
                    print(file=sys.stderr)
                break
            except UnicodeError as error:
                self.failed += 1
                say(f"That is no text: {error}")
                continue
            if line.strip():
                self.answer_line(line)
        return 2 if self.failed and not asking else 0

    def answer_line(self, line: str) -> None:
        """Answer a message, or carry out a command; what fails is said."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
            else:
                self.send(line.removeprefix("/") if line.startswith("//") else line)
        except KeyboardInterrupt:
            say("\ninterrupted: the conversation is as it was")
        except KVTierError as error:
            self.failed += 1
            say(f"kvtier: {plain(with_flags(str(error)), lines=True)}")
        except BrokenPipeError:  # nobody reads the answers, as after `| head`: no other line needs one
            raise
        except Exception as error:  # of the model, the template, the device: others may work, and nothing is lost
            self.failed += 1
            what = f"{type(error).__name__}: {plain(str(error), lines=True)}"
            say(f"kvtier: no answer, {what}. The conversation is as it was.")

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word not in self.commands:
            self.failed += 1
            say(f"There is no {plain(word)}. /help lists what there is; //{plain(line[1:])} would be a message.")
            return
        self.commands[word](rest.strip())

    def _history(self, _: str) -> None:
        for message in messages_of({"messages": self.messages}):
            say(f"{plain(str(message.get('role')))}: {plain(str(message.get('content')), lines=True)}")

    def _quit(self, _: str) -> None:
        self.done = True

    def _prompt(self) -> str:
        return f"{plain(self.name)}> "
