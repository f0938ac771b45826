"""Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Iterator, Sequence
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
_LOST: Final = "conversation_not_found"
_KINDS: Final[dict[type[PolicyError], tuple[int, str, str]]] = {
    InvalidRequest: (400, INVALID, "invalid_value"),
    UnknownVersion: (404, INVALID, "model_not_found"),
    EpisodeUnknown: (404, INVALID, _LOST),
    EpisodeElsewhere: (404, INVALID, _LOST),
    NotAllowed: (401, "authentication_error", "not_allowed"),
    Overloaded: (429, "rate_limit_error", "overloaded"),
    NotReady: (503, "server_error", "not_ready"),
    DeadlinePassed: (504, "server_error", "deadline"),
    Unreachable: (503, "server_error", "unreachable"),
    BadReply: (502, "server_error", "bad_reply"),
}
_CODES: Final = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
"""Of what the framework refuses."""
_FIELD: Final = re.compile(r"(?:([a-z_]+\[\d+\](?:\.[a-z_]+)*)[ :=]|([a-z_]+(?:\.[a-z_]+)*)[=:\[])", re.ASCII)
_NAMES: Final = {
    "count": "n",
    "episode_id": "metadata.conversation_id",
    "conversation_id": "metadata.conversation_id",
    "begins_with": "tool_choice",
    "thought_tokens": "penstock.thought_tokens",
    "arm": "model",
    "version": "model",
}
"""What a field of the server's is called here."""
_OF_REWARDS: Final = {
    "episode_id": "conversation_id",
    "request_id": "conversation_id",
    "rewards.turn": "turn",
}
"""And in a reward."""


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


def of_server(
    error: PolicyError, *, conversation: str = "", is_reward: bool = False, option: str = "--server"
) -> ChatError:
    """Return what the server of text said, as an answer.

    conversation: what the caller calls its conversation. is_reward: whether it posted a reward. option: by
    which the gateway was told where the server is.
    """
    status, kind, code = _KINDS.get(type(error), (502, "server_error", "refused"))
    detail = str(error) if error.refusal is None else error.refusal.detail
    if isinstance(error, Unreachable):
        detail += f"; start it, or start the gateway with another {option}"
    found = _FIELD.match(detail) if status < 500 else None
    field = None if found is None else found[1] or found[2]
    names = _OF_REWARDS if is_reward else _NAMES
    param = None if field is None else names.get(field, field)
    if conversation and code == _LOST:
        param = "conversation_id" if is_reward else _NAMES["conversation_id"]
        detail = f"{param}={conversation!r}: {detail.partition(': ')[2]}"
    elif field is not None and param is not None:
        detail = param + detail.removeprefix(field)
    retry_s = error.refusal.retry_after_ms / 1000 if error.refusal and status == 429 else None
    return ChatError(status, detail, param=param, code=code, kind=kind, retry_s=retry_s)


def of_value(error: ValueError) -> ChatError:
    """Return what the text client cannot send, as an answer."""
    found = _FIELD.match(str(error))
    param = None if found is None else found[1] or found[2]
    return ChatError(400, str(error), param=param, code="invalid_value")


def add_handlers(app: FastAPI) -> None:
    """Make every error that a route may raise on purpose an answer; defects are the envelope's."""

    @app.exception_handler(ChatError)
    async def own(_request: Request, error: ChatError) -> Response:
        return error.response()

    @app.exception_handler(PolicyError)
    async def server(request: Request, error: PolicyError) -> Response:
        conversation = getattr(request.state, "conversation", "")
        is_reward = request.url.path.endswith("/rewards")
        option = getattr(request.state, "option", "--server")
        return of_server(error, conversation=conversation, is_reward=is_reward, option=option).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def framework(_request: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "refused")
        return ChatError(error.status_code, str(error.detail), code=code).response()


def of_validation(error: RequestValidationError) -> ChatError:
    """Return what is wrong with a body, by its first mistake."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ChatError(400, "the body is not JSON", code="invalid_json")
    place = ".".join(_place(first["loc"][1:], error.body, is_missing=first["type"] == "missing")) or None
    if first["type"] == "extra_forbidden":
        return ChatError(
            400, f"{place}: is not known here: leave it out", param=place, code="unknown_parameter"
        )
    return ChatError(400, f"{place or 'the body'}: {first['msg']}", param=place, code="invalid_value")


def _place(location: Sequence[str | int], body: Any, *, is_missing: bool) -> Iterator[str]:
    """The parts of a place that are in the body: those of a choice among forms are not.

    is_missing: what the last part names is not there.
    """
    for index, part in enumerate(location):
        is_there = isinstance(body, dict) and part in body
        is_there |= isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_there:
            body = body[part]
        if is_there or (is_missing and index == len(location) - 1):
            yield str(part)
