"""The one table from errors to HTTP replies, and the JSON body that they all share.

Runs wherever an error is caught; owns nothing. An error without a row in the table is ours: it is
logged with its stack and the client reads only ``internal error``.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from quart import Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from mlx_troupe.runtime.errors import (
    GenerationFailed,
    ModelError,
    Overloaded,
    RequestError,
    TroupeError,
    Unavailable,
    UnknownStream,
)

if TYPE_CHECKING:
    from quart import Quart

log = logging.getLogger(__name__)

UNAVAILABLE_RETRY_SECONDS = 5
"""Retry-After of a 503: a restart of the engine takes seconds, a load longer; both are polled."""


class HttpRefusal(TroupeError):
    """A request refused for its HTTP form (host, content type), before its body is read."""

    code = "bad_request"

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message, code=code)
        self.status = status


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as the client sees it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None


class ErrorDetail(msgspec.Struct):
    """The ``error`` object of the OpenAI wire format."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """Body of every error reply, and of the last event of a stream that failed."""

    error: ErrorDetail


TABLE: tuple[tuple[type[TroupeError], int, str], ...] = (
    (UnknownStream, 404, "invalid_request_error"),
    (RequestError, 400, "invalid_request_error"),
    (Overloaded, 429, "resource_admission"),
    (Unavailable, 503, "service_unavailable"),
    (GenerationFailed, 500, "server_error"),
    (ModelError, 503, "server_error"),
)
"""Status and type of each error class of the runtime; its ``code`` is its own."""

HTTP_CODES: dict[int, tuple[str, str]] = {
    400: ("bad_request", "bad request"),
    404: ("not_found", "not found"),
    405: ("method_not_allowed", "method not allowed"),
    408: ("request_timeout", "the request body took too long to arrive"),
    413: ("request_too_large", "the request body is too large"),
}
"""Code and message of the errors that the framework raises itself."""

INTERNAL = ErrorReply(500, "server_error", "internal_error", "internal error")


def describe(error: Exception) -> ErrorReply:
    """The reply for an error; anything not in the table is an internal error."""
    match error:
        case HTTPException():
            return _describe_http(error.code or 500)
        case HttpRefusal():
            return ErrorReply(error.status, "invalid_request_error", error.code, error.message)
        case TroupeError():
            return _describe_troupe(error)
        case _:
            return INTERNAL


def error_json(reply: ErrorReply) -> bytes:
    """The JSON body of a reply. Text that is not valid Unicode is replaced, never raised on."""
    message = reply.message.encode("utf-8", "replace").decode("utf-8")
    param = reply.param
    if param is not None:
        param = param.encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, reply.type, param, reply.code)))


def error_response(reply: ErrorReply) -> Response:
    """A whole HTTP response for an error."""
    response = Response(error_json(reply), reply.status, content_type="application/json")
    if reply.retry_after is not None:
        response.headers["Retry-After"] = str(reply.retry_after)
    return response


def add_error_handlers(app: Quart) -> None:
    """Make every error of the app a JSON reply from the table."""

    async def on_troupe_error(error: TroupeError) -> Response:
        reply = describe(error)
        if reply.status >= 500 and not isinstance(error, Unavailable):
            log.error("request failed: %s", error.message, exc_info=error)
        return error_response(reply)

    async def on_http_error(error: HTTPException) -> Response:
        response = error_response(describe(error))
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
        return response

    app.register_error_handler(TroupeError, on_troupe_error)
    app.register_error_handler(HTTPException, on_http_error)


def _describe_http(status: int) -> ErrorReply:
    if status >= 500:
        return INTERNAL
    code, message = HTTP_CODES.get(status, ("bad_request", "bad request"))
    return ErrorReply(status, "invalid_request_error", code, message)


def _describe_troupe(error: TroupeError) -> ErrorReply:
    for kind, status, type_ in TABLE:
        if isinstance(error, kind):
            return ErrorReply(
                status,
                type_,
                error.code,
                error.message,
                error.param if isinstance(error, RequestError) else None,
                _retry_after(error),
            )
    return INTERNAL


def _retry_after(error: TroupeError) -> int | None:
    match error:
        case Overloaded():
            return math.ceil(error.retry_after)
        case Unavailable():
            return UNAVAILABLE_RETRY_SECONDS
        case _:
            return None
