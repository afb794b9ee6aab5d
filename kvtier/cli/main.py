"""The parser of all commands. Each command is a module with `add(parsers)`, and imports what it needs when it runs."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import os
import re
import select
import sys
from collections.abc import Sequence
from typing import Any

from kvtier.cli import calibrate, env, replay, serve, store
from kvtier.cli.arguments import with_flags
from kvtier.cli.bench import command as bench
from kvtier.cli.chat import command as chat
from kvtier.cli.plan import command as plan
from kvtier.errors import KVTierError

#: What an output cannot be written for: it is closed, its disk is full, a limit is reached, the device fails.
_OF_WRITING = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1: the answer is no; 2: an error, told in a sentence on stderr, also where what it prints is lost; 130 after
        Ctrl-C; 141 where whoever reads the output has gone, as of a program that SIGPIPE ends.
    """
    _open_streams()
    _print_any_text()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError as error:
        if not _reader_is_gone():
            _tell(str(error))
            return 2
        return 141
    except (KVTierError, OSError) as error:
        _tell(_why(error))
        return 2
    except KeyboardInterrupt:
        _tell("interrupted")
        return 130
    finally:
        _drop_unwritten()


def _run(argv: Sequence[str]) -> int:
    """Run a command, and write all that it prints: an error of that is raised here, and not as the process ends."""
    parser: argparse.ArgumentParser = _Parser(
        prog="kvtier", description="A tiered KV cache for Hugging Face Transformers."
    )
    parser.add_argument("--version", action="version", version=f"kvtier {sys.modules['kvtier'].__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    plan.add(commands)
    chat.add(commands)
    serve.add(commands)
    store.add(commands)
    env.add(commands)
    bench.add(commands)
    calibrate.add(commands)
    replay.add(commands)
    try:
        args = parser.parse_args(_joined(argv))
        if "run" not in args:
            parser.print_help(sys.stderr)
            return 2
        status = int(args.run(args))
    except SystemExit:  # as after --version or --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status


class _Parser(argparse.ArgumentParser):
    """Of this command and of those within: argparse's own takes help that cannot be written for written."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def _why(error: KVTierError | OSError) -> str:
    """What went wrong. What has no file's name was printed, as far as one can tell."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_WRITING:
        return f"write error: {os.strerror(error.errno)}"
    return with_flags(str(error))


def _drop_unwritten() -> None:
    """What could not be printed is tried again as the process ends: Python then complains, and changes the status."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop_output()


def _drop_output() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(why: str) -> None:
    """The status says it, too, where nothing can be written, as to a log on a disk that is full."""
    with contextlib.suppress(OSError):
        print(f"kvtier: {store.plain(why, lines=True)}", file=sys.stderr)


def _open_streams() -> None:
    """Whoever starts a command may close its standard streams, as `<&-` and `>&-` do. Python has None in their place:
    then nothing is read, messages are dropped, and a command that prints has failed, as with other programs."""
    for name, mode, flag in (("stdin", "r", os.O_RDWR), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_RDWR)):
        if getattr(sys, name) is None:  # as Python's own, it is not closed with the process, which would warn of that
            setattr(sys, name, open(os.open(os.devnull, flag), mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _print_any_text() -> None:
    """Where the encoding of the output lacks a character, as of a name or of an answer, it is written out: an error
    would take away all that comes behind it."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    with contextlib.suppress(OSError):  # it was a file when it was opened, and its handle is that of a pipe by now
        if sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        elif sys.stdout.errors == "surrogateescape":  # of the locale C, in which names of files stay as they are
            codecs.register_error("kvtier", _written_out)
            sys.stdout.reconfigure(errors="kvtier")


def _written_out(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


def _joined(argv: Sequence[str]) -> list[str]:
    """Arguments in which a value such as -1GiB belongs to the option before it, as after "=": what is wrong with it is
    then said by whoever reads the value, and not that there is none."""
    found: list[str] = []
    for text in argv:
        if found and re.fullmatch(r"--[a-z][a-z-]*", found[-1]) and re.match(r"-[\d.]", text):
            found[-1] += f"={text}"
        else:
            found.append(text)
    return found


def _reader_is_gone() -> bool:
    """Whether nobody reads what is printed, as after `| head`. What is left to print is then dropped."""
    try:
        number = sys.stdout.fileno()
        asked = select.poll()
        asked.register(number, select.POLLOUT)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0)):
            return False
    except (AttributeError, OSError, ValueError):  # no file, or no such question on this system
        return False
    _drop_output()
    return True
