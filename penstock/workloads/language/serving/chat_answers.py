"""Answers, their parts and refusals in the form of OpenAI's API."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from penstock.client.http_calls import INVALID, ChatError, event
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.routing import Arm
from penstock.workloads.language.serving.asks import TextAnswer, TextReply


class Envelope:
    """What all parts of one answer have in common. model: as the caller asked for it."""

    def __init__(self, model: str, name: str) -> None:
        """name: of the answer; its caller's."""
        self._model, self._id, self._created = model, f"chatcmpl-{name}", int(time.time())

    def completion(self, given: TextReply, *, logprobs: bool) -> dict[str, Any]:
        """Return a whole answer."""
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer) if logprobs else None,
            }
            for index, answer in enumerate(_told(given))
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

    def last_parts(self, given: TextReply, *, logprobs: bool, with_usage: bool) -> Iterator[str]:
        """Return calls of tools, the ends of all answers, and what they took, as events."""
        for index, answer in enumerate(_told(given)):
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

    def _answered(self, kind: str, given: TextReply) -> dict[str, Any]:
        # The model name by which this version can be asked for: tracing of agents records the field as
        # gen_ai.openai.response.system_fingerprint (OpenTelemetry's conventions for OpenAI).
        policy = self._model.partition(":")[0]
        return self._head(kind) | {"system_fingerprint": f"{policy}:{given.version}"}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def usage(given: TextReply) -> dict[str, Any]:
    """Return the tokens of prompt and answers; those of thoughts are counted among the answers'."""
    thoughts = [answer.thought.tokens for answer in given.answers if answer.thought is not None]
    written = sum(len(answer.ids) for answer in _told(given)) + sum(thoughts)
    counted: dict[str, Any] = {
        "prompt_tokens": given.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": given.prompt_tokens + written,
    }
    if thoughts:
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(thoughts)}
    return counted


def extension(given: TextReply) -> dict[str, Any]:
    """Return what the API has no field for."""
    return {
        "conversation_id": given.conversation_id or None,
        "turn": given.turn if given.conversation_id else None,
        "version": given.version,
        "arm": given.arm.value,
        "fallback": "adapter_off" if given.is_fallback else None,
        "learned": not given.unlearned,
        "unlearned": given.unlearned or None,
        "token_ids": [answer.ids for answer in _told(given)],
        "thoughts": [_thought(answer) for answer in given.answers],
    }


def models(
    run: str, policy: str, served: Mapping[int, Sequence[Arm]], labels: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the names that can be asked for. policy: as its caller calls it. served: versions, with arms."""
    arms = {arm.value for of in served.values() for arm in of}
    names = [policy, *(f"{policy}:{one}" for one in (*sorted(arms), *served, *labels))]
    return [{"id": name, "object": "model", "created": 0, "owned_by": run} for name in names]


def _told(given: TextReply) -> list[TextAnswer]:
    return [answer.told() for answer in given.answers]


def _message(answer: TextAnswer) -> dict[str, Any]:
    calls = _calls(answer)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.message.content or (None if calls else ""),
    }
    return message | ({"tool_calls": calls} if calls else {})


def _thought(answer: TextAnswer) -> dict[str, Any] | None:
    thought = answer.thought
    if thought is None:
        return None
    told = {"tokens": thought.tokens, "milliseconds": thought.milliseconds, "is_cut": thought.is_cut}
    return told | ({"text": thought.text, "token_ids": thought.ids} if thought.ids else {})


def _calls(answer: TextAnswer) -> list[dict[str, Any]]:
    return [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in answer.message.tool_calls
    ]


def _logprobs(answer: TextAnswer) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
        for text, number in zip(answer.tokens, answer.log_prob, strict=True)
    ]
    return {"content": content, "refusal": None}


# ---- Refusals, and bodies of another form.

_LOST: Final = "conversation_not_found"
_KINDS: Final = {
    Reason.INVALID: (400, INVALID, "invalid_value"),
    Reason.UNKNOWN_VERSION: (404, INVALID, "model_not_found"),
    Reason.EPISODE_UNKNOWN: (404, INVALID, _LOST),
    Reason.EPISODE_ELSEWHERE: (404, INVALID, _LOST),
    Reason.OVERLOADED: (429, "rate_limit_error", "overloaded"),
    Reason.NOT_READY: (503, "server_error", "not_ready"),
    Reason.DEADLINE: (504, "server_error", "deadline"),
}
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


def of_refusal(error: Refused, *, conversation: str = "", is_reward: bool = False) -> ChatError:
    """Return a refusal as an answer.

    conversation: what the caller calls its conversation. is_reward: whether it posted a reward.
    """
    refusal = error.refusal
    status, kind, code = _KINDS.get(refusal.reason, (502, "server_error", "refused"))
    detail = refusal.detail
    found = _FIELD.match(detail) if status < 500 else None
    field = None if found is None else found[1] or found[2]
    names = _OF_REWARDS if is_reward else _NAMES
    param = None if field is None else names.get(field, field)
    if conversation and code == _LOST:
        param = "conversation_id" if is_reward else _NAMES["conversation_id"]
        detail = f"{param}={conversation!r}: {detail.partition(': ')[2]}"
    elif field is not None and param is not None:
        detail = param + detail.removeprefix(field)
    retry_s = refusal.retry_after_ms / 1000 if status == 429 else None
    return ChatError(status, detail, param=param, code=code, kind=kind, retry_s=retry_s)


def of_value(error: ValueError) -> ChatError:
    """Return what no message can hold, as an answer."""
    found = _FIELD.match(str(error))
    param = None if found is None else found[1] or found[2]
    return ChatError(400, str(error), param=param, code="invalid_value")


def of_validation(error: ValidationError, body: Any) -> ChatError:
    """Return what is wrong with a body, by its first mistake."""
    first = error.errors()[0]
    place = ".".join(_place(first["loc"], body, is_missing=first["type"] == "missing")) or None
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
