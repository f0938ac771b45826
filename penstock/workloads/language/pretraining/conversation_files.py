"""Conversations of files: JSON lines, or one JSON list, of objects in any of three forms.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}     OpenAI
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}         ShareGPT
    {"prompt": "…", "response": "…"}                                                            one answer

A conversation that cannot be used is counted and named.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.feedback.examples import BadRows
from penstock.workloads.language.prompt import Message, parse_prompt

MAX_FILE_BYTES: Final = 2**30
_ROLES: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, with at least one answer to something. where: for messages."""

    messages: tuple[Message, ...]
    where: str


def read_conversations(files: Sequence[Path]) -> tuple[list[Conversation], BadRows]:
    """Return the conversations of files in their order, and what could not be used.

    Raises ConfigurationError for a file that cannot be read, or where no conversation is left.
    """
    found, bad = list[Conversation](), BadRows()
    for file in files:
        for where, row in _rows(file):
            try:
                if isinstance(row, ValueError):
                    raise row
                found.append(Conversation(_messages(row), where))
            except ValueError as error:
                bad.add(where, str(error))
    if not found:
        names = ", ".join(map(str, files))
        raise ConfigurationError("\n".join([f"{names}: no conversation can be used", *bad.lines()]))
    return found, bad


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"{file}: is larger than {MAX_FILE_BYTES} bytes: split it")
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        yield from _listed(file, text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{file.name} line {number}", _parsed(line)


def _listed(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    whole = _parsed(text)
    if isinstance(whole, ValueError):
        raise ConfigurationError(f"{file}: {whole}")
    for number, row in enumerate(whole, 1):
        yield f"{file.name} item {number}", row


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")


def _messages(row: Any) -> tuple[Message, ...]:
    """Return the messages of a row, an answer last; raises ValueError that says what is wrong."""
    if not isinstance(row, dict):
        raise ValueError("is no object")  # noqa: TRY004 - counted with the other bad rows
    if "messages" in row:
        messages = parse_prompt(row["messages"])
    elif "conversations" in row:
        messages = tuple(map(_shared, _list(row["conversations"])))
    elif "prompt" in row and isinstance(row.get("response"), str):
        before = parse_prompt(row["prompt"])
        asked = (Message("user", before),) if isinstance(before, str) else before
        messages = (*asked, Message("assistant", row["response"]))
    else:
        raise ValueError("has neither messages, nor conversations, nor prompt and response")
    if isinstance(messages, str):
        raise ValueError("messages is text: write a list of messages")  # noqa: TRY004
    return _up_to_answer(messages)


def _up_to_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages up to the last answer; raises ValueError where roles do not take turns."""
    said = list(messages)
    while said and said[-1].role != "assistant":
        said.pop()
    turns = [one.role for one in said if one.role != "system"]
    if not turns:
        raise ValueError("has no answer of an assistant")
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("user and assistant do not take turns, the user first")
    if not all(one.content.strip() for one in said):
        raise ValueError("has an empty message")
    return tuple(said)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("conversations is no list")  # noqa: TRY004 - counted with the other bad rows
    return value


def _shared(value: Any) -> Message:
    role, content = (value.get("from"), value.get("value")) if isinstance(value, dict) else (None, None)
    if role not in _ROLES or not isinstance(content, str):
        raise ValueError(f"has a message with from={role!r}: use {', '.join(_ROLES)}, with a text as value")
    return Message(_ROLES[role], content)
