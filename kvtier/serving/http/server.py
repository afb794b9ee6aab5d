"""The model, its store, its engine and a port; and the end of all that."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvtier.conversation.given.prompts import Prompts
from kvtier.conversation.store import ConversationStore
from kvtier.errors import ConfigError
from kvtier.hf.engine.settings import token_by_token
from kvtier.hf.models.positions import count_of_positions
from kvtier.serving.engine import Engine
from kvtier.serving.http.app import build
from kvtier.serving.http.front import Door
from kvtier.serving.http.handlers.handler import Served
from kvtier.serving.http.manager import EngineManager, Limits
from kvtier.serving.http.metrics import Metrics
from kvtier.serving.http.requests.keys import Keys, secret_of

_LOG = logging.getLogger("kvtier.serving")

#: Headers of an answer that a page of another origin may read.
_EXPOSED = ("x-request-id", "retry-after")
#: Seconds for telling clients that the server ends.
_LAST_WORDS = 2


@dataclass(frozen=True)
class ServerOptions:
    """How a server is set.

    Attributes:
        name: of the model, for clients.
        directory: of the store; None: what is kept ends with the server.
        store, engine: options of `ConversationStore` and `Engine`.
        keys: the name of each API key; none: everybody may ask.
        context: tokens of a sequence, at the most; None: what the model has.
        default_tokens: of an answer of a chat that names no limit.
        ttl: seconds after which a session that was not used is forgotten.
        sessions: that are known at a time.
        max_body: bytes of a request.
        timeout: seconds that a client may take to send, and to read a part.
        drain: seconds that requests may take to finish at the end.
        template: what the chat template is given besides messages, where a request says nothing else.
        origins: pages of which browsers may ask, such as "http://localhost:3000"; "*": of all.
    """

    name: str
    directory: str | None = None
    store: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    context: int | None = None
    default_tokens: int = 1024
    ttl: float = math.inf
    sessions: int = 10_000
    max_body: int = 16 << 20
    timeout: float = 60.0
    drain: float = 30.0
    template: dict[str, Any] = field(default_factory=dict)
    origins: tuple[str, ...] = ()


class Server:
    """An engine behind a port.

        with Server(model, tokenizer, ServerOptions("qwen3")) as server:
            server.run(socket)

    Args:
        model, tokenizer: of Transformers.
        options: how it is set.

    Raises:
        KVTierError: as of `ConversationStore` and `Engine`.
    """

    def __init__(self, model: Any, tokenizer: Any, options: ServerOptions) -> None:
        Prompts(tokenizer, None, options.template, any_tools=True)  # raises ConfigError
        self._options = options
        self._uvicorn: uvicorn.Server | None = None
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(ConversationStore(model, directory=options.directory, **options.store))
            engine = Engine(model, tokenizer, store=store, **options.engine)
            stack.callback(engine.close)
            secret = secret_of(options.directory)
            self.keys = Keys(options.keys, secret)
            context = _context(model, options.context)
            for setting, plain in token_by_token(own := model.generation_config).items():
                said = f"sets {setting}={getattr(own, setting)!r}, which is not served"
                _LOG.warning("The model's generation config %s: answers are decoded with %s=%r.", said, setting, plain)
            metrics = Metrics(options.name)
            limits = Limits(context, options.default_tokens, options.ttl, options.sessions)
            self.manager = EngineManager(engine, tokenizer, store=store, keys=self.keys, metrics=metrics, limits=limits)
            stack.callback(self.manager.stop)
            served = Served(options.name, model, tokenizer, int(time.time()), context, options.template)
            app = build(served, self.manager)
            app.router.lifespan_context = self._life
            self.app: ASGIApp = Door(
                app,
                self.keys,
                metrics,
                max_body=options.max_body,
                timeout=options.timeout,
                draining=lambda: self.manager.draining,
            )
            if options.origins:  # around the door: a page reads why it was refused, and its browser asks without a key
                told: dict[str, Any] = {"allow_methods": ("GET", "HEAD", "POST"), "expose_headers": _EXPOSED}
                if "allow_private_network" in inspect.signature(CORSMiddleware).parameters:
                    told["allow_private_network"] = True  # else a browser that asks for it is refused all of it
                self.app = CORSMiddleware(self.app, options.origins, allow_headers=("*",), **told)
            self._stack = stack.pop_all()
        engine.start()

    @contextlib.asynccontextmanager
    async def _life(self, _: Any) -> AsyncIterator[None]:
        manager = self.manager
        forever = [
            asyncio.ensure_future(x) for x in (manager.forget_sessions_forever(), manager.tell_problems_forever())
        ]
        yield
        for each in forever:
            each.cancel()

    def run(self, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, or `stop`. Then requests may finish for as long as `drain` says; those that
        have not are cancelled.

        Args:
            listening: a socket that is bound.
            ready: called when requests are taken.
        """
        config = uvicorn.Config(
            self.app,
            http=type("_Connection", (_Connection,), {"seconds": self._options.timeout}),
            log_config=None,
            access_log=False,
            # Behind the moment at which requests are cancelled: uvicorn would cut their answers off.
            timeout_graceful_shutdown=math.ceil(self._options.drain) + _LAST_WORDS,
            timeout_keep_alive=75,
            lifespan="on",
        )
        self._uvicorn = _Uvicorn(config, self.manager, ready, self._options.drain)
        self._uvicorn.run(sockets=[listening])

    def stop(self) -> None:
        """Let `run` end, as SIGTERM does. Any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def close(self) -> None:
        """Cancel what runs, save what is kept, and give everything back. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Connection(AutoHTTPProtocol):
    """Ends where no request has begun in time: before its headers have come, no app knows of it. And where its client
    reads nothing for as long: behind the end of an app, too, there may be much of its answer that was not sent.

    Attributes:
        seconds: for each of these; for the first, from the first byte or, of the first request, from the connection on.
    """

    seconds: float
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing pauses for as long as there is anything that was not sent
        self._wait()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._has_begun:
            self._stop_waiting()
        elif self._late is None:
            self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(error)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stop_watching()
        super().resume_writing()

    @property
    def _has_begun(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._late = self.loop.call_later(self.seconds, self._end)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if not self._has_begun:
            self.transport.close()

    def _watch(self, before: float = math.inf) -> None:
        """Look whether the client has read since the last look, at whose time there was so much to send."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._unread = self.loop.call_later(self.seconds, self._watch, left)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class _Uvicorn(uvicorn.Server):
    """Says when it begins, and that it drains."""

    should_exit: bool

    def __init__(self, config: uvicorn.Config, manager: EngineManager, ready: Callable[[], None], drain: float) -> None:
        super().__init__(config)
        self._manager = manager
        self._ready = ready
        self._drain = drain
        self._hurried = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain; a second Ctrl-C does not wait for requests, and a third one not even for what they are told.

        uvicorn would raise the signal again behind the end, and SIGTERM would kill the process before it has saved what
        is kept.
        """
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit, self._hurried = self._hurried, True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests are taken from here on."""
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests are refused from here on, and those that run may finish."""
        self._manager.draining = True
        load = self._manager.engine.load
        if count := load.running + load.waiting:
            what, them = ("1 request", "it") if count == 1 else (f"{count} requests", "them")
            _LOG.info("%s may finish, within %g s. A second Ctrl-C cancels %s.", what, self._drain, them)
        ending = asyncio.ensure_future(self._end_requests())
        try:
            await super().shutdown(sockets=sockets)
            if self.force_exit:  # uvicorn leaves it out, and its task would be cancelled, with a traceback
                await self.lifespan.shutdown()
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        """Cancel what has not finished in time, so that its clients hear why, and not only that nothing comes."""
        end = time.monotonic() + self._drain
        while time.monotonic() < end and not self._hurried:
            await asyncio.sleep(0.05)
        self._manager.cancel_everything()
        if self._hurried:
            await asyncio.sleep(_LAST_WORDS)
            self.force_exit = True


def _context(model: Any, asked: int | None) -> int | None:
    """Tokens of a sequence, at the most.

    Raises:
        ConfigError: more than the model has.
    """
    limit = count_of_positions(model)
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(f"--max-model-len {asked}: the model has {limit} positions.")
    return limit if asked is None else asked


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        OSError: the port is taken, or the address is none.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
        listening.set_inheritable(True)
    except BaseException:
        listening.close()
        raise
    return listening
