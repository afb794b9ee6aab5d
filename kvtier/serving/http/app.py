"""Transformers' app with our handlers, and what else it has."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from kvtier.serving.http.handlers.chat import ChatHandler
from kvtier.serving.http.handlers.completions import CompletionHandler
from kvtier.serving.http.handlers.handler import Served, streamed
from kvtier.serving.http.handlers.responses import ResponsesHandler
from kvtier.serving.http.manager import EngineManager
from kvtier.serving.http.requests.refusals import Refusal, fault, invalid, shown

#: Routes of Transformers' app that are kept. Its others are of models that come and go, of audio, or are ours.
_KEPT = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/openapi.json", "/docs")


class _None:
    """A handler of what is not served. Nothing routes to it."""

    async def handle_request(self, *args: Any) -> Any:
        """Refuse."""
        raise Refusal(404, "This server has no such endpoint.", code="not_found")


class State(GenerationState):
    """All requests go to one engine.

    Args:
        manager: of it.
    """

    def __init__(self, manager: EngineManager) -> None:
        super().__init__(continuous_batching=True)
        self._manager = manager

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """They do."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> EngineManager:
        """See `GenerationState`."""
        return self._manager

    def is_cb_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._manager.alive

    def shutdown(self) -> None:
        """The server ends its engine itself."""


def build(served: Served, manager: EngineManager) -> FastAPI:
    """The app.

    Args:
        served: its model.
        manager: of the engine that runs it.
    """
    state = State(manager)
    chat, completions, responses = (
        kind(served, manager, state) for kind in (ChatHandler, CompletionHandler, ResponsesHandler)
    )
    handlers = {"completion_handler": completions, "response_handler": responses, "transcription_handler": _None()}
    if "systemone_handler" in inspect.signature(build_server).parameters:  # not in 5.17
        handlers["systemone_handler"] = _None()
    app: FastAPI = build_server(served, chat, **handlers, generation_state=state)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in _KEPT]
    _add_routes(app, served, manager)
    _add_errors(app)
    return app


def _add_routes(app: FastAPI, served: Served, manager: EngineManager) -> None:
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [served.entry]})

    async def model(name: str) -> JSONResponse:
        served.check(name)
        return JSONResponse(served.entry)

    async def health() -> JSONResponse:
        status, found = health_of(manager)
        return JSONResponse(found, status_code=status)

    async def metrics() -> PlainTextResponse:
        text = await manager.look(manager.text_of_metrics)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(body: dict[str, Any]) -> StreamingResponse:
        name = body.get("model")
        if not isinstance(name, str):
            raise invalid("model", f"give the name of a model, not {shown(name)}")
        return streamed(served.load_model_streaming(name))

    app.add_api_route("/load_model", load, methods=["POST"])
    routes = {"/v1/models": models, "/v1/models/{name:path}": model, "/health": health, "/metrics": metrics}
    for path, answer in routes.items():  # whoever asks whether it is there asks for its head
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)


def health_of(manager: EngineManager) -> tuple[int, dict[str, Any]]:
    """A status of HTTP, and why. It waits for nobody: neither for prompts that are read nor for a step."""
    load = manager.engine.load
    state = "shutting down" if manager.draining else "ok" if load.alive else "the engine's thread has ended"
    return 200 if state == "ok" else 503, {
        "status": state,
        "running": load.running,
        "waiting": load.waiting,
        "runner": manager.engine.runner,
    }


def _add_errors(app: FastAPI) -> None:
    """All errors have the body that OpenAI's clients read."""

    def refused(_: Request, error: Refusal) -> JSONResponse:
        return JSONResponse(error.body, status_code=error.status, headers=error.headers)

    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first, kind = (error.errors() or [{}])[0], request.headers.get("content-type", "")
        why = f"{first.get('msg', '')}."
        if not kind.partition(";")[0].strip().lower().endswith(("/json", "+json")):  # of curl it is that of a form
            why = f"its Content-Type is {kind!r}. Send it with Content-Type: application/json."
        return refused(request, Refusal(400, f"The body is no JSON object: {why}", code="invalid_json"))

    def failed(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, UnicodeDecodeError):  # FastAPI does not say what it could not read
            text = f"The body is no JSON object: its bytes are no text: {error.__cause__}."
            return refused(request, Refusal(400, text, code="invalid_json"))
        text, path = str(error.detail), request.url.path
        if text == "Not Found":  # of a path, as Starlette says it
            text = f"There is no {path} here: clients ask below /v1, such as /v1/models."
        elif error.status_code == 405:
            text = f"{path} takes {(error.headers or {}).get('Allow', 'others')}, and not {request.method}."
        return JSONResponse(Refusal(error.status_code, text).body, status_code=error.status_code, headers=error.headers)

    def broke(request: Request, error: Exception) -> JSONResponse:
        return refused(request, fault(error, "internal_error"))

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, failed)
    app.add_exception_handler(Exception, broke)
