"""What `kvtier chat` shows: an answer as it comes on stdout; all else on stderr, dim where there are colours."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvtier.cli.store import plain
from kvtier.errors import ConfigError
from kvtier.serving.text import TextStream

if TYPE_CHECKING:
    from kvtier.conversation.calls.reuse import RowReuse


def say(text: str = "", end: str = "\n") -> None:
    """A line that is not part of an answer, or a piece of one."""
    dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print(f"\x1b[2m{text}\x1b[0m" if dim and text else text, end=end, file=sys.stderr, flush=True)


class Answer:
    """Follows an answer: a streamer of `generate`, which calls `put` with the prompt and each token, and `end`.

    Args:
        tokenizer: turns tokens into text.
        positions: that the model can compute; None: there is no end of them.

    Attributes:
        times: when each token came, in seconds.
    """

    def __init__(self, tokenizer: Any, positions: int | None = None) -> None:
        self.times: list[float] = []
        self._positions = positions
        self._text = TextStream(tokenizer)
        self._began = time.perf_counter()
        self._prompt = True
        self._plain = sys.stdout.isatty()

    def put(self, value: Any) -> None:
        """Take the prompt at the first call, tokens at each that follows.

        Raises:
            ConfigError: the prompt has more tokens than the model has positions. Nothing was computed.
        """
        if self._prompt:
            self._prompt = False
            length = value.shape[-1]
            if self._positions is not None and length > self._positions:
                raise ConfigError(
                    f"The conversation has {length:,} tokens with this message, and the model has {self._positions:,} "
                    "positions: /rewind, or /open another one."
                )
            return
        self.times.append(time.perf_counter())
        self._show("".join(self._text.put(token) for token in value.reshape(-1).tolist()))

    def end(self) -> None:
        """All tokens have come."""
        self._show(self._text.end())

    def _show(self, text: str) -> None:
        if text:
            sys.stdout.write(plain(text, lines=True) if self._plain else text)
            sys.stdout.flush()

    def status(self, reuse: RowReuse, why: str = "") -> str:
        """What the answer took: tokens of the prompt that were in memory, read from the disk, and computed; the time to
        the first token; and the rate of the others."""
        parts = [f"{reuse.cached - reuse.loaded:,} cached", f"{reuse.loaded:,} loaded", f"{reuse.computed:,} computed"]
        if self.times:
            parts.append(f"first token {self.times[0] - self._began:.2f} s")
        if len(self.times) > 1 and (took := self.times[-1] - self.times[0]) > 0:
            parts.append(f"{(len(self.times) - 1) / took:.1f} tokens/s")
        return f"[{' · '.join([*parts, *([why] if why else [])])}]"


class Stop:
    """A stopping criterion of `generate`: whether somebody pressed Ctrl-C, or no position is left. Ctrl-C, pressed
    again, interrupts at once.

    Args:
        positions: that the model can compute; None: there is no end of them.

    Attributes:
        why: it has stopped an answer; "": it has not.
    """

    def __init__(self, positions: int | None = None) -> None:
        self.asked = False
        self.why = ""
        self._positions = positions

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        rows, length = input_ids.shape
        if self.asked:
            self.why = "stopped"
        elif self._positions is not None and length > self._positions:  # the last token is not computed
            self.why = f"the model has {self._positions:,} positions"
        return input_ids.new_full((rows,), bool(self.why)).bool()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Ctrl-C asks, for as long as this lasts."""

        def ask(number: int, frame: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        try:
            before = signal.signal(signal.SIGINT, ask)
        except ValueError:  # not the main thread, which signals come to
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
