"""Answers and their parts in the form of OpenAI's API."""

import json
import re
import time
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
    Generation,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    TextAnswer,
    TextDescription,
    UnknownVersion,
    Unreachable,
)


class Envelope:
    """What all parts of one answer have in common. model: as the caller asked for it."""

    def __init__(self, model: str, name: str) -> None:
        """name: of the answer; its caller's."""
        self._model, self._id, self._created = model, f"chatcmpl-{name}", int(time.time())

    def completion(self, given: Generation, *, logprobs: bool) -> dict[str, Any]:
        """Return a whole answer."""
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer) if logprobs else None,
            }
            for index, answer in enumerate(given.answers)
        ]
        return self._answered("chat.completion", given) | {
            "choices": choices,
            "usage": usage(given),
            "penstock": extension(given),
        }

    def part(self, index: int, delta: dict[str, Any]) -> str:
        """Return what came to an answer, as an event."""
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def last_parts(self, given: Generation, *, logprobs: bool, with_usage: bool) -> Iterator[str]:
        """Return calls of tools, the ends of all answers, and what they took, as events."""
        for index, answer in enumerate(given.answers):
            calls = [{"index": place} | call for place, call in enumerate(_calls(answer))]
            if calls:
                yield self.part(index, {"tool_calls": calls})
            choice = {
                "index": index,
                "delta": {},
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer) if logprobs else None,
            }
            yield event(
                self._answered("chat.completion.chunk", given)
                | {"choices": [choice], "penstock": extension(given)}
            )
        if with_usage:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(given)})
        yield "data: [DONE]\n\n"

    def _answered(self, kind: str, given: Generation) -> dict[str, Any]:
        # The model name by which this version can be asked for: tracing of agents records the field as
        # gen_ai.openai.response.system_fingerprint (OpenTelemetry's conventions for OpenAI).
        policy = self._model.partition(":")[0]
        return self._head(kind) | {"system_fingerprint": f"{policy}:{given.version}"}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def event(content: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def usage(given: Generation) -> dict[str, Any]:
    """Return the tokens of prompt and answers; those of thoughts are counted among the answers'."""
    thoughts = [answer.thought.tokens for answer in given.answers if answer.thought is not None]
    written = sum(len(answer.token_ids) for answer in given.answers) + sum(thoughts)
    counted: dict[str, Any] = {
        "prompt_tokens": given.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": given.prompt_tokens + written,
    }
    if thoughts:
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(thoughts)}
    return counted


def extension(given: Generation) -> dict[str, Any]:
    """Return what the API has no field for."""
    return {
        "conversation_id": given.conversation_id or None,
        "turn": given.turn if given.conversation_id else None,
        "version": given.version,
        "arm": given.arm.name.lower() if given.arm else None,
        "fallback": given.fallback.name.lower() if given.fallback else None,
        "learned": given.learned,
        "unlearned": given.unlearned or None,
        "token_ids": [answer.token_ids for answer in given.answers],
        "thoughts": [_thought(answer) for answer in given.answers],
    }


def models(described: TextDescription, agent: str = "") -> list[dict[str, Any]]:
    """Return the names that can be asked for. agent: what its policy is called here; "": as itself."""
    policy = agent or described.policy
    arms = {arm.name.lower() for version in described.versions for arm in version.arms}
    numbers = [version.version for version in described.versions]
    which = [*sorted(arms), *numbers, *described.labels]
    names = [policy, *(f"{policy}:{one}" for one in which)]
    return [{"id": name, "object": "model", "created": 0, "owned_by": described.run} for name in names]


def _message(answer: TextAnswer) -> dict[str, Any]:
    calls = _calls(answer)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if calls else "")}
    return message | ({"tool_calls": calls} if calls else {})


def _thought(answer: TextAnswer) -> dict[str, Any] | None:
    thought = answer.thought
    if thought is None:
        return None
    told = {"tokens": thought.tokens, "milliseconds": thought.milliseconds, "is_cut": thought.is_cut}
    return told | ({"text": thought.text, "token_ids": thought.token_ids} if thought.is_shown else {})


def _calls(answer: TextAnswer) -> list[dict[str, Any]]:
    return list(answer.message.get("tool_calls", ()))


def _logprobs(answer: TextAnswer) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
        for text, number in zip(answer.tokens, answer.log_prob, strict=True)
    ]
    return {"content": content, "refusal": None}


# ---- Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}`.

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
