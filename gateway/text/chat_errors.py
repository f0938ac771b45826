"""Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}`."""

import re
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.client import (
    BadReply,
    DeadlinePassed,
    EpisodeElsewhere,
    EpisodeUnknown,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    UnknownVersion,
    Unreachable,
)

INVALID: Final = "invalid_request_error"
_KINDS: Final[dict[type[PolicyError], tuple[int, str, str]]] = {
    InvalidRequest: (400, INVALID, "invalid_value"),
    UnknownVersion: (404, INVALID, "model_not_found"),
    EpisodeUnknown: (404, INVALID, "conversation_not_found"),
    EpisodeElsewhere: (404, INVALID, "conversation_not_found"),
    NotAllowed: (401, "authentication_error", "not_allowed"),
    Overloaded: (429, "rate_limit_error", "overloaded"),
    NotReady: (503, "server_error", "not_ready"),
    DeadlinePassed: (504, "server_error", "deadline"),
    Unreachable: (503, "server_error", "unreachable"),
    BadReply: (502, "server_error", "bad_reply"),
}
_FIELD: Final = re.compile(r"(?:([a-z_]+\[\d+\](?:\.[a-z_]+)*)[ :=]|([a-z_]+(?:\.[a-z_]+)*)[=:\[])", re.ASCII)
_NAMES: Final = {
    "count": "n",
    "episode_id": "metadata.conversation_id",
    "conversation_id": "metadata.conversation_id",
    "begins_with": "tool_choice",
    "arm": "model",
    "version": "model",
}
"""What a field of the server's is called here."""


class ChatError(Exception):
    """An answer other than success. param: the field of the request. retry_s: after which to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, retry_s
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }

    def response(self) -> Response:
        """Return the error as an answer."""
        headers = {} if self.retry_s is None else {"Retry-After": str(max(1, round(self.retry_s)))}
        return JSONResponse(self.body, status_code=self.status, headers=headers)


def of_server(error: PolicyError) -> ChatError:
    """Return what the server of text said, as an answer."""
    status, kind, code = _KINDS.get(type(error), (502, "server_error", "refused"))
    detail = str(error) if error.refusal is None else error.refusal.detail
    if isinstance(error, Unreachable):
        detail += "; start it, or start the gateway with another --server"
    found = _FIELD.match(detail) if status < 500 else None
    field = None if found is None else found[1] or found[2]
    param = None if field is None else _NAMES.get(field, field)
    retry_s = error.refusal.retry_after_ms / 1000 if error.refusal and status == 429 else None
    return ChatError(status, detail, param=param, code=code, kind=kind, retry_s=retry_s)


def add_handlers(app: FastAPI) -> None:
    """Make every error that a route may raise an answer."""

    @app.exception_handler(ChatError)
    async def own(_request: Request, error: ChatError) -> Response:
        return error.response()

    @app.exception_handler(PolicyError)
    async def server(_request: Request, error: PolicyError) -> Response:
        return of_server(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def framework(_request: Request, error: HTTPException) -> Response:
        return ChatError(error.status_code, str(error.detail), code="not_found").response()


def of_validation(error: RequestValidationError) -> ChatError:
    """Return what is wrong with a body, by its first mistake."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ChatError(400, "the body is not JSON", code="invalid_json")
    place = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["type"] == "extra_forbidden":
        return ChatError(
            400, f"{place}: is not known here: leave it out", param=place, code="unknown_parameter"
        )
    return ChatError(400, f"{place or 'the body'}: {first['msg']}", param=place, code="invalid_value")
