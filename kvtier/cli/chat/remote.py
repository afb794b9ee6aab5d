"""`kvtier chat --url`: the same conversation in the terminal, with a server that speaks OpenAI's interface."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from kvtier.cli.chat.lines import Loop
from kvtier.cli.chat.screen import say
from kvtier.cli.store import plain
from kvtier.errors import ConfigError

_COMMANDS = """\
/regenerate       another answer to the last message
/rewind [N]       forget the last N messages and their answers (1)
/open NAME        a new conversation of that name
/name             the name of this conversation
/history          what was said
/quit             leave; so do Ctrl-C and Ctrl-D
//...             a message that begins with a slash
Ctrl-C stops an answer, and keeps what was said of it.
Behind each answer: tokens of the prompt that the server had (cached), and those that it computed."""
#: Environment variables that may hold a key, the first one first.
_KEYS = ("KVTIER_API_KEY", "OPENAI_API_KEY")
_TIMEOUT = 600.0


class ServerError(OSError):
    """A server refuses, or fails."""


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Talk to a server.

    Args:
        args: of `kvtier chat`.
        options: of `generate`, as it makes them.
    """
    for name in ("device", "dtype", "device_budget", "host_budget", "disk_budget"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is the server's: leave it out with --url.")
    server = Connection(args.url)
    models = server.models()
    if not models or (args.model is not None and args.model not in models):
        wanted = "" if args.model is None else f", and not {args.model!r}"
        raise ConfigError(f"{args.url} serves {', '.join(models) or 'no model'}{wanted}.")
    asked: dict[str, Any] = {"model": args.model or models[0], "max_tokens": options["max_new_tokens"]}
    if args.temperature is not None:
        asked["temperature"] = args.temperature
    sent = ("top_p", "seed", "chat_template_kwargs")
    asked |= {name: value for name in sent if (value := getattr(args, name)) is not None}
    return RemoteLoop(server, args.name, args.system, asked).talk()


class Connection:
    """A server.

    Args:
        url: with which its interface begins, such as "http://127.0.0.1:8000/v1"; "/v1" may be left out.

    Raises:
        ConfigError: it is none.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:  # brackets or a port that are none
            raise ConfigError(f"--url {url}: {error}. Give http://HOST:PORT or https://HOST.") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"--url {url}: give http://HOST:PORT or https://HOST.")
        self._url = url
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._where = (host, port)
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        name, key = next(((name, os.environ[name]) for name in _KEYS if os.environ.get(name)), ("", "none"))
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"The key in {name} has characters that no header can have, such as a line break.")
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def models(self) -> list[str]:
        """The names of its models.

        Raises:
            ConfigError: nobody is there. ServerError: it refuses.
        """
        connection = self._kind(*self._where, timeout=30)
        try:
            answer = self._answer(connection, "GET", "/models")
            return [str(model["id"]) for model in json.load(answer)["data"]]
        except ServerError:
            raise
        except OSError as error:
            raise ConfigError(f"--url {self._url}: {error}. Is a server running there?") from error
        except (ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            raise ConfigError(f"--url {self._url}: what answers there is no such server ({error!r}).") from error
        finally:
            connection.close()

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer. Closed before its end, the server ends it too.

        Raises:
            ServerError: it refuses, or fails.
        """
        connection = self._kind(*self._where, timeout=_TIMEOUT)
        try:
            answer = self._answer(connection, "POST", "/chat/completions", body)
            while line := answer.readline():
                field, _, value = line.decode().partition(":")
                data = value.strip() if field == "data" else ""  # what a proxy sends to keep a line open is a comment
                if data == "[DONE]":
                    return
                if data:
                    event: dict[str, Any] = json.loads(data)
                    if "error" in event:
                        raise ServerError(_message(event))
                    yield event
            raise ServerError("the answer broke off")
        except ServerError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the server cannot be reached: {error}") from error
        finally:
            connection.close()

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._path + path, data, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read(1 << 16).decode(errors="replace")
            try:
                message = _message(json.loads(text))
            except ValueError:
                message = text
            raise ServerError(f"the server says {answer.status}: {plain(message)}")
        return answer


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class RemoteLoop(Loop):
    """Lines are read, and a server answers.

    Args:
        server: that answers.
        name: of the conversation, which the server's session is.
        system: the first message of new conversations; None: they begin with the user's.
        asked: fields of each request.
    """

    help = _COMMANDS

    def __init__(self, server: Connection, name: str, system: str | None, asked: dict[str, Any]) -> None:
        super().__init__()
        self._server = server
        self._asked = asked
        self._system = system
        self.name = name
        self.messages: list[dict[str, Any]] = []

    @property
    def commands(self) -> dict[str, Callable[[str], None]]:
        """By name."""
        return super().commands | {
            "/regenerate": self._regenerate,
            "/rewind": self._rewind,
            "/open": self._open,
            "/name": lambda _: say(plain(self.name)),
        }

    def send(self, text: str) -> None:
        """Say something, and print the answer."""
        first = [] if self.messages or self._system is None else [{"role": "system", "content": self._system}]
        self._answer([*self.messages, *first, {"role": "user", "content": text}])

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        said, stopped, usage, began = _Said(), False, dict[str, Any](), time.perf_counter()
        body = {**self._asked, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        events = self._server.stream({**body, "prompt_cache_key": self.name})
        try:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    said.take(choice)
        except KeyboardInterrupt:
            if not said.text:
                raise
            stopped = True
        finally:
            events.close()  # type: ignore[attr-defined]
            said.end()
        self.messages = [*messages, {"role": "assistant", "content": said.text}]
        say(_status(usage, said.times, began, stopped))

    def _regenerate(self, _: str) -> None:
        if not self.messages:
            say("There is no answer to generate again.")
            return
        self._answer(self.messages[:-1])

    def _rewind(self, rest: str) -> None:
        if rest and not rest.isdecimal():
            say("/rewind takes a number of messages.")
            return
        at = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        turns = int(rest or 1)
        if not 0 <= turns <= len(at):
            say(f"The conversation has {len(at)} messages of yours.")
            return
        if turns:
            self.messages = self.messages[: at[-turns]]
            if all(message["role"] == "system" for message in self.messages):
                self.messages = []

    def _open(self, name: str) -> None:
        if not name:
            say("/open takes a name.")
            return
        self.name, self.messages = name, []


class _Said:
    """An answer, shown as it comes: on stdout, and on stderr what the model thinks.

    Attributes:
        text: of it, without thoughts.
        times: when each part came, in seconds.
    """

    def __init__(self) -> None:
        self.text = ""
        self.times: list[float] = []
        self._thinks = False

    def take(self, choice: dict[str, Any]) -> None:
        """A part of it."""
        delta = choice.get("delta") or {}
        text, thought = delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")
        if text or thought or choice.get("finish_reason"):
            self.times.append(time.perf_counter())
        if thought:
            say(plain(thought, lines=True), end="")
            self._thinks = True
        if text:
            self._end_thought()
            self.text += text
            sys.stdout.write(plain(text, lines=True) if sys.stdout.isatty() else text)
            sys.stdout.flush()

    def end(self) -> None:
        """Nothing more comes."""
        self._end_thought()
        if self.text:
            print(flush=True)

    def _end_thought(self) -> None:
        if self._thinks:
            say()
            self._thinks = False


def _status(usage: dict[str, Any], times: list[float], began: float, stopped: bool) -> str:
    """What an answer took."""
    parts = []
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts += [f"{cached:,} cached", f"{usage['prompt_tokens'] - cached:,} computed"]
    if times:
        parts.append(f"first token {times[0] - began:.2f} s")
    if len(times) > 1 and usage and (took := times[-1] - times[0]) > 0:
        parts.append(f"{(usage['completion_tokens'] - 1) / took:.1f} tokens/s")
    return f"[{' · '.join([*parts, *(['stopped'] if stopped else [])])}]"
