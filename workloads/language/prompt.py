"""What a response answers: a text, or a conversation."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    role: system, user, assistant, or what the tokenizer's chat template knows.
    """

    role: str
    content: str


Prompt = str | tuple[Turn, ...]


def parse_prompt(value: Any) -> Prompt:
    """A prompt as files and the wire hold it: text, or a list of messages.

    A message is {"role": …, "content": …}. Raises ValueError.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable) or isinstance(value, dict | bytes):
        raise ValueError(f"prompt is {type(value).__name__}, neither text nor a list of messages")  # noqa: TRY004
    turns = tuple(_turn(one) for one in value)
    if not turns:
        raise ValueError("prompt is an empty conversation")
    return turns


def plain(prompt: Prompt) -> Any:
    """The inverse: what JSON can hold."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": turn.role, "content": turn.content} for turn in prompt]


def identity(prompt: Prompt) -> str:
    """Equal for equal prompts only."""
    return json.dumps(plain(prompt), ensure_ascii=False, sort_keys=True)


def _turn(value: Any) -> Turn:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("prompt holds a message without a text under `role` and one under `content`")  # noqa: TRY004
    return Turn(role, content)
