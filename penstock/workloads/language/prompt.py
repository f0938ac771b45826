"""Prompts: a text, or a conversation."""

import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class ToolCall:
    """A tool call. arguments: a JSON object as text; two texts are equal where their values are.

    Clients that send a call back may have parsed the arguments and written them with other blanks and
    escapes.
    """

    id: str
    name: str
    arguments: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolCall) or (self.id, self.name) != (other.id, other.name):
            return False
        if self.arguments == other.arguments:
            return True
        try:
            return _canonical(self.arguments) == _canonical(other.arguments)
        except (ValueError, RecursionError):
            return False

    def __hash__(self) -> int:
        return hash((self.id, self.name))


def _canonical(text: str) -> str:
    """Return JSON in one form; 1 and 1.0 are one value, as for JavaScript, and `true` is another."""
    return json.dumps(json.loads(text, parse_int=float), sort_keys=True)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message of a conversation. Two are equal whatever the form of their Unicode and the blanks around.

    role: system, user, assistant, tool, or another role of the tokenizer's chat template.
    content: empty where an assistant only calls tools.
    tool_calls: of an assistant. tool_call_id: the call that a tool's message answers.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and (
            (self.role, self.tool_calls, self.tool_call_id)
            == (other.role, other.tool_calls, other.tool_call_id)
            and (self.content == other.content or _bare(self.content) == _bare(other.content))
        )

    def __hash__(self) -> int:
        return hash((self.role, _bare(self.content), self.tool_calls, self.tool_call_id))

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Return all of its texts with their names."""
        own = [(name, getattr(self, name)) for name in ("content", "role", "tool_call_id")]
        names = ("id", "name", "arguments")
        return own + [(f"tool_calls.{name}", getattr(one, name)) for one in self.tool_calls for name in names]


def _bare(text: str) -> str:
    """Return a text without what clients change that send it back: its ends, line ends, composed letters."""
    return unicodedata.normalize("NFC", text).replace("\r\n", "\n").strip()


Prompt = str | tuple[Message, ...]


def parse_prompt(value: Any) -> Prompt:
    """Return the prompt of a JSON value: text, or a list of messages {"role": …, "content": …}.

    Raises ValueError.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable) or isinstance(value, dict | bytes):
        raise ValueError(f"prompt is {type(value).__name__}, neither text nor a list of messages")  # noqa: TRY004
    messages = tuple(_message(one) for one in value)
    if not messages:
        raise ValueError("prompt is an empty conversation")
    return messages


def plain(prompt: Prompt) -> Any:
    """Return a prompt as a JSON value, the inverse of `parse_prompt`."""
    if isinstance(prompt, str):
        return prompt
    return [_plain(message) for message in prompt]


def identity(prompt: Prompt) -> str:
    """Return a text that is equal for equal prompts alone."""
    return json.dumps(plain(prompt), ensure_ascii=False, sort_keys=True)


def _plain(message: Message) -> dict[str, Any]:
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        value["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        value["tool_call_id"] = message.tool_call_id
    return value


def _message(value: Any) -> Message:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    given = (value.get("tool_calls") or []) if isinstance(value, dict) else []
    if not isinstance(given, Iterable) or isinstance(given, dict | str | bytes):
        raise ValueError(f"prompt holds a message with tool_calls={given!r:.80}: write a list")  # noqa: TRY004
    calls = tuple(map(_tool_call, given))
    if calls and content is None:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("prompt holds a message without a text under `role` and one under `content`")  # noqa: TRY004
    answers = value.get("tool_call_id") or ""
    if not isinstance(answers, str):
        raise ValueError("prompt holds a message whose `tool_call_id` is no text")  # noqa: TRY004
    return Message(role, content, calls, answers)


def _tool_call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    given = (
        (value.get("id"), function.get("name"), function.get("arguments"))
        if isinstance(function, dict)
        else (None,)
    )
    if not all(isinstance(text, str) for text in given):
        raise ValueError(
            "prompt holds a tool call without texts under `id`, `function.name` and `function.arguments`"
        )
    return ToolCall(*given)
