"""Answers and their parts in the form of OpenAI's API."""

import json
import time
from collections.abc import Iterator
from typing import Any

from penstock.client import Generation, TextAnswer, TextDescription


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
