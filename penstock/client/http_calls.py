"""Requests to OpenAI's API and answers as data, between a server of text and what speaks HTTP before it."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.errors import (
    BadReply,
    DeadlinePassed,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    PolicyError,
    Unreachable,
)

INVALID: Final = "invalid_request_error"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """Fields as in the message. headers: by names in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    agent: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer whose body comes in parts, which are read once."""

    status: int
    headers: Mapping[str, str]
    parts: AsyncGenerator[bytes, None]

    async def whole(self) -> bytes:
        return b"".join([part async for part in self.parts])


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Return an answer in JSON."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return HttpReply(status, {"content-type": JSON, **(headers or {})}, _once(body.encode()))


def event(content: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


class ChatError(Exception):
    """An answer other than success, as OpenAI's API has it.

    param: the field of the request. retry_s: after which to try again.
    """

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
        self.status = status
        self.headers = {} if retry_s is None else {"retry-after": str(max(1, round(retry_s)))}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def reply(self) -> HttpReply:
        return json_reply(self.body, self.status, self.headers)


_KINDS: Final[dict[type[PolicyError], tuple[int, str, str]]] = {
    InvalidRequest: (400, INVALID, "invalid_value"),
    NotAllowed: (401, "authentication_error", "not_allowed"),
    Overloaded: (429, "rate_limit_error", "overloaded"),
    BadReply: (502, "server_error", "bad_reply"),
    Unreachable: (503, "server_error", "unreachable"),
    DeadlinePassed: (504, "server_error", "deadline"),
}


def unanswered(error: PolicyError, remedy: str) -> ChatError:
    """Return as an answer why the server gave none; remedy: is added to what the error says."""
    status, kind, code = _KINDS.get(type(error), (502, "server_error", "refused"))
    return ChatError(status, f"{error}{remedy}", code=code, kind=kind)


def unknown_model(policy: str, others: Sequence[str] = ()) -> ChatError:
    """Return the error of a model name that is none. policy, others: those that there are."""
    beside = f"; the same of {', '.join(others)}" if others else ""
    return ChatError(
        404,
        f"model: there is none of that name; use {policy}, {policy}:latest, {policy}:active, "
        f"{policy}:canary, a version as {policy}:40, or its label{beside}",
        param="model",
        code="model_not_found",
    )


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
