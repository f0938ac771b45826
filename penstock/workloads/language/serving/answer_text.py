"""The text of an answer while its tokens come: where it is stopped, what is safe to show, calls of tools.

A model calls a tool by `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen do. What
does not parse, or names no tool that was offered, stays text.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from penstock.workloads.language.prompt import Message, ToolCall
from penstock.workloads.language.tokenizer import Tokenizer

OPENING: Final = "<tool_call>"
_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_UNFINISHED: Final = "\ufffd"
"""What a decoder writes for a character of which not all bytes came."""


class AnswerText:
    """Grows token by token. stops: texts that end it. begins_with: what was written for the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        begins_with: str = "",
        holds_calls: bool = False,
    ) -> None:
        """holds_calls: whether what may be the call of a tool is kept back while it grows."""
        self._tokenizer, self._stops, self._begin = tokenizer, tuple(stops), begins_with
        self._held = (*self._stops, OPENING) if holds_calls else self._stops
        self._ids: list[int] = []
        self._shown = 0
        self.text = begins_with
        self.is_stopped = False
        self.tokens: list[str] = []
        """Text that each token added."""

    def add(self, token: int) -> None:
        """One more token; where a text of `stops` is complete `text` ends before it, and `is_stopped`."""
        self._ids.append(token)
        before = self.text
        written = self._begin + self._tokenizer.decode(self._ids, skip_special_tokens=True)
        self.tokens.append(written[len(before) :] if written.startswith(before) else "")
        found = [place for stop in self._stops if (place := written.find(stop)) >= 0]
        self.is_stopped = bool(found)
        self.text = written[: min(found)] if found else written

    def take_shown(self) -> str:
        """Text that was not taken before and is certain: no part of a stop, a call or half a character."""
        return self._take(self._certain())

    def take_rest(self, message: Message) -> str:
        """What was not taken before of the message that the text has become."""
        return self._take(message.content)

    def _take(self, text: str) -> str:
        part, self._shown = text[self._shown :], max(self._shown, len(text))
        return part

    def _certain(self) -> str:
        text = self.text.rstrip(_UNFINISHED)
        if OPENING not in self._held:
            return self._without_held(text)
        before, opening, _ = text.partition(OPENING)
        return (before if opening else self._without_held(text)).rstrip()  # as it is before a call

    def _without_held(self, text: str) -> str:
        """The text without what may be the beginning of a stop or a call at its end."""
        for held in self._held:
            for length in range(min(len(held) - 1, len(text)), 0, -1):
                if text.endswith(held[:length]):
                    return text[:-length]
        return text


def as_message(text: str, tools: Collection[dict[str, Any]], call_id: str) -> Message:
    """The assistant's message of a text. call_id: first part of the ids of its calls."""
    names = {tool["function"]["name"] for tool in tools}
    calls: list[ToolCall] = []

    def take(match: "re.Match[str]") -> str:
        parsed = _parsed(match[1], names)
        if parsed is None:
            return match[0]
        calls.append(ToolCall(f"{call_id}-{len(calls)}", *parsed))
        return ""

    rest = _CALL.sub(take, text) if names else text
    return Message("assistant", rest.rstrip() if calls else rest, tuple(calls))


def _parsed(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call; None for what is none."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = said.get("name"), said.get("arguments", {})
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
