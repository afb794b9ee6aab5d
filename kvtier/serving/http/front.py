"""The door, plain ASGI around the app: who is asking, how much, and whether the client is still there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvtier.serving.http.metrics import Metrics
from kvtier.serving.http.requests.keys import VISIT, Caller, Keys, Visit
from kvtier.serving.http.requests.refusals import Refusal, shutting_down

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

#: What needs a key, where there are keys. The rest says nothing of anybody's requests, and holds no body.
_GUARDED = ("/v1/", "/load_model")
_SESSION = b"x-session-id"
_REQUEST_ID = b"x-request-id"
_LONGEST_SESSION = 256
#: Of a body that is too large, or of no use, so many times the limit is read before it is answered.
_DISCARDED = 4
#: Half of a pair of surrogates, as JSON escapes it; or what looks so behind an escaped backslash.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
#: Where each such half has its other one. No part is tried in two ways: the time is in the length of a body.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)


class Door:
    """Around the app.

    Args:
        app: inside.
        keys: of the server.
        metrics: that count what is refused here.
        max_body: bytes of a request, at the most.
        timeout: seconds that a client may take to send its request.
        draining: whether no more requests are taken.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        metrics: Metrics,
        *,
        max_body: int,
        timeout: float,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_body = max_body
        self._timeout = timeout
        self._draining = draining

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _named(scope, send)
        end, sent = asyncio.get_running_loop().time() + self._timeout, _Sent(receive)
        try:
            visit = Visit(self._caller(scope))
            if scope["method"] == "POST" and self._draining():
                raise shutting_down()
            async with asyncio.timeout_at(end):
                body = await self._body(scope, sent)
            visit.size = len(body)
            _check_text(body)
        except Refusal as error:
            if error.status == 413:
                with contextlib.suppress(TimeoutError, ConnectionError):  # a client that stalls hears of it, too
                    async with asyncio.timeout_at(end):
                        await self._discard(sent)
            await self._refuse(error, send)
            return
        except TimeoutError:
            await self._refuse(Refusal(408, "The request did not come in time.", code="timeout"), send)
            return
        except ConnectionError:
            return
        await self._visited(visit, body, scope, receive, send)

    async def _visited(
        self, visit: Visit, body: bytes, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Run the app until it has answered, or the client has left."""
        exchange = _Exchange(body, receive, send, self._metrics)
        token = VISIT.set(visit)
        try:
            answering = asyncio.ensure_future(self._app(scope, exchange.receive, exchange.send))
            leaving = asyncio.ensure_future(exchange.wait_for_leaving())
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() and not exchange.answered:
                    answering.cancel()
                await asyncio.wait({answering})
            finally:
                leaving.cancel()
                answering.cancel()
                visit.leave()
            if not answering.cancelled() and not exchange.gone.is_set():
                answering.result()
        finally:
            VISIT.reset(token)

    def _caller(self, scope: MutableMapping[str, Any]) -> Caller:
        headers = dict(scope["headers"])
        session = headers.get(_SESSION, b"").decode("latin-1") or None
        if session is not None and len(session) > _LONGEST_SESSION:
            raise Refusal(400, f"x-session-id: at most {_LONGEST_SESSION} characters.", code="invalid_value")
        if not scope["path"].startswith(_GUARDED):
            return Caller("", session)
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
        return self._keys.caller(given or None, session)

    async def _body(self, scope: MutableMapping[str, Any], sent: _Sent) -> bytes:
        """The whole of it, where something may read it. ConnectionError: the client has left."""
        if not scope["path"].startswith(_GUARDED):
            await self._discard(sent)
            return b""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        parts, total = list[bytes](), 0
        while sent.more:
            parts.append(await sent.part())
            total += len(parts[-1])
            if total > self._max_body:
                raise self._too_large()
        return b"".join(parts)

    async def _discard(self, sent: _Sent) -> None:
        """Take some more of a body, for a client that still sends does not read its answer."""
        left = _DISCARDED * self._max_body
        while sent.more and left > 0:
            left -= len(await sent.part())

    def _too_large(self) -> Refusal:
        return Refusal(413, f"A request has at most {self._max_body} bytes here.", code="request_too_large")

    async def _refuse(self, error: Refusal, send: Send) -> None:
        self._metrics.refused(error.status)
        body = json.dumps(error.body).encode()
        # What is left of its body is not read: the connection ends.
        headers = {"Content-Type": "application/json", "Connection": "close", **error.headers}
        headers["Content-Length"] = str(len(body))
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})


def _named(scope: MutableMapping[str, Any], send: Send) -> Send:
    """Sends what a client calls its request back with every answer: the app does so with those of its own only."""
    name = dict(scope["headers"]).get(_REQUEST_ID)

    async def named(message: Message) -> None:
        headers = list(message.get("headers", ()))
        if message["type"] == "http.response.start" and _REQUEST_ID not in dict(headers):
            message["headers"] = [*headers, (_REQUEST_ID, name)]
        await send(message)

    return send if name is None else named


def _check_text(body: bytes) -> None:
    """Refuse strings that are no text: half of a pair of surrogates has no bytes, so that nothing takes it. JSON is
    read from UTF-8, UTF-16 and UTF-32, and Python takes such halves from all of these, escaped or not."""
    with contextlib.suppress(UnicodeDecodeError):
        body.decode()
        if b"\0" not in body and not _HALF.search(body):
            return
    with contextlib.suppress(ValueError, RecursionError):  # no JSON: the app says so
        if not _is_text(body.decode(json.detect_encoding(body), "surrogatepass")):
            json.loads(body)
            text = "A string in the body has one half of a surrogate pair without the other: it is no text."
            raise Refusal(400, text, code="invalid_json")


def _is_text(text: str) -> bool:
    try:
        return _WHOLE.fullmatch(text.encode()) is not None
    except UnicodeEncodeError:
        return False


class _Sent:
    """What a client sends, in parts.

    Attributes:
        more: whether there is more of it.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True

    async def part(self) -> bytes:
        """The next one. ConnectionError: the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        self.more = message.get("more_body", False)
        return bytes(message.get("body", b""))


class _Exchange:
    """One request and its answer, as the app sees them.

    Attributes:
        answered: the whole answer has been sent.
        gone: set when the client has left.
    """

    def __init__(self, body: bytes, receive: Receive, send: Send, metrics: Metrics) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._metrics = metrics
        self.answered = False
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        """The request; then nothing, until the client leaves."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def wait_for_leaving(self) -> None:
        """Return when the client has left or the answer is sent, which look the same here."""
        watching = asyncio.ensure_future(self._watch())
        try:
            await self.gone.wait()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def send(self, message: Message) -> None:
        """Send a part."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._metrics.refused(message["status"])
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.answered = True
