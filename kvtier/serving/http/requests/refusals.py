"""`Refusal`: an answer that says no, as OpenAI's interface has it."""

from __future__ import annotations

import logging
from typing import Any

from kvtier.errors import BudgetError, ClosedError, ConfigError, QueueFullError, UnsupportedError

_LOG = logging.getLogger("kvtier.serving")

#: What a status is called in the body, where it has a name of its own.
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do.
        code: a word for programs.
        param: the field that it is about.
        retry_after: seconds after which to try again; None: that would not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Beside the body."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(name: str, why: str) -> Refusal:
    """A field is not what it can be, and why."""
    return Refusal(400, f"{name}: {why}.", code="invalid_value", param=name)


def shown(value: Any) -> str:
    """A value as a refusal shows it, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shutting_down(retry_after: int = 1) -> Refusal:
    """The end of the server has begun."""
    return Refusal(503, "The server is shutting down.", code="shutting_down", retry_after=retry_after)


def too_long(context: int, prompt: str) -> Refusal:
    """A prompt does not fit into the context: it has so much."""
    return Refusal(
        400,
        f"This model's maximum context length is {context} tokens: the prompt has {prompt}.",
        code="context_length_exceeded",
    )


def refusal_of_asked(error: BaseException, retry_after: int = 1) -> Refusal:
    """How an error is said that the engine raises as a request is added: what it asks may be wrong.

    Args:
        retry_after: seconds until a full queue may have room.
    """
    if isinstance(error, ConfigError):
        return Refusal(400, str(error), code="invalid_value")
    if isinstance(error, UnsupportedError):
        return Refusal(400, str(error), code="unsupported")
    return refusal_of(error, retry_after)


def refusal_of(error: BaseException, retry_after: int = 1) -> Refusal:
    """How an error is said that a request which was taken ends with. What is no fault of the request's is logged, with
    where it was raised: what it says may be of files, or of others' requests, and its client hears the kind of it.

    A `BudgetError` is of the request's own size even then: the engine preempts all others before it gives one up.

    Args:
        retry_after: seconds until a full queue may have room.
    """
    from kvtier.hf.engine.sampling import NoTokenError  # and torch, without which a command line is read

    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), code="queue_full", retry_after=retry_after)
    if isinstance(error, BudgetError):
        return Refusal(400, str(error), code="budget_exceeded")
    if isinstance(error, NoTokenError):
        return Refusal(400, str(error), code="invalid_value")
    if isinstance(error, ClosedError):
        return shutting_down(retry_after)
    return fault(error, "generation_failed")


def fault(error: BaseException, code: str) -> Refusal:
    """A fault of the server: whoever runs it reads in the log what its clients are not told."""
    _LOG.error("A request failed.", exc_info=error)
    return Refusal(500, f"{type(error).__name__}: the log of the server has the rest.", code=code)
