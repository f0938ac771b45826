"""Conversations in files of JSON lines, or of one JSON list, whose objects have one of three forms.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}     OpenAI
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}         ShareGPT
    {"prompt": "…", "response": "…"}                                                            one answer

An answer with `"weight": 0` is context, and not learned.
Conversations that cannot be used are counted, and the first ones named.
"""

import importlib.resources
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.row_file import RowFile
from penstock.workloads.language.feedback import BadRows, made_of
from penstock.workloads.language.prompt import Message, Prompt, parse_prompt

_ROLES: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with at least one answer, which is the last.

    where: place in its file, for messages. unlearned: indices of answers that are context only.
    """

    messages: tuple[Message, ...]
    where: str
    unlearned: frozenset[int] = frozenset()


def read_conversations(files: Sequence[Path]) -> tuple[list[Conversation], BadRows]:
    """Return the conversations of files in their order, and the rows that cannot be used."""
    found, bad = list[Conversation](), BadRows()
    for file in files:
        with RowFile.of(file) as rows:
            numbered = ((f"{file.name} {rows.unit} {number}", row) for number, row in rows.rows())
            found += made_of(numbered, bad, _conversation)
    if not found:
        names = ", ".join(map(str, files))
        raise ConfigurationError("\n".join([f"{names}: no conversation can be used", *bad.lines()]))
    return found, bad


def _conversation(where: str, row: dict[str, Any]) -> Conversation:
    messages = _messages(row)
    turns = row.get("messages") or row.get("conversations") or []
    weights = [
        _weight(one) if said.role == "assistant" else 0 for one, said in zip(turns, messages, strict=False)
    ]
    if turns and not any(weights):
        raise ValueError("no answer is learned: each has weight=0")
    return Conversation(
        messages, where, frozenset(index for index, weight in enumerate(weights) if not weight)
    )


def _weight(turn: Mapping[str, Any]) -> int:
    weight = turn.get("weight")
    if weight is None or weight in (0, 1):
        return 1 if weight is None else int(weight)
    raise ValueError(f"has a message with weight={weight!r:.80}: use 0, which is not learned, or 1")


def _messages(row: dict[str, Any]) -> tuple[Message, ...]:
    if row.get("messages") is not None:
        messages = parse_prompt(row["messages"])
    elif row.get("conversations") is not None:
        if not isinstance(row["conversations"], list):
            raise ValueError("conversations is no list")
        messages = tuple(map(_shared, row["conversations"]))
    elif row.get("prompt") is not None and isinstance(row.get("response"), str):
        before = parse_prompt(row["prompt"])
        asked = (Message("user", before),) if isinstance(before, str) else before
        messages = (*asked, Message("assistant", row["response"]))
    else:
        raise ValueError("has neither messages, nor conversations, nor prompt and response")
    if isinstance(messages, str):
        raise ValueError("messages is text: write a list of messages")  # noqa: TRY004
    return _up_to_answer(messages)


def _up_to_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages up to the last answer; raises ValueError where the roles do not alternate."""
    kept = list(messages)
    while kept and kept[-1].role != "assistant":
        kept.pop()
    turns = [one.role for one in kept if one.role != "system"]
    if not turns:
        raise ValueError("has no answer of an assistant")
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("user and assistant do not take turns, the user first")
    if not all(one.content.strip() for one in kept):
        raise ValueError("has an empty message")
    return tuple(kept)


def _shared(value: Any) -> Message:
    role, content = (value.get("from"), value.get("value")) if isinstance(value, dict) else (None, None)
    if role not in _ROLES or not isinstance(content, str):
        raise ValueError(f"has a message with from={role!r}: use {', '.join(_ROLES)}, with a text as value")
    return Message(_ROLES[role], content)


# ---- Conversations of a package: small talk, trivia, questions about computers.

PACKAGE: Final = "chatterbot_corpus"
_LEFT_OUT: Final = frozenset({"coding", "tech_support"})
_MARKS: Final = ".?!,;:"


def packaged_conversations() -> list[Conversation]:
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigurationError(
            f"the conversations of {PACKAGE} are not installed: pip install 'penstock-rl[data]', or name "
            "files"
        )
    import yaml  # noqa: PLC0415 - of the extra that has the package

    folder = importlib.resources.files(PACKAGE) / "data" / "english"
    found: dict[tuple[str, ...], Conversation] = {}
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        topic = file.name.removesuffix(".yml")
        if topic in _LEFT_OUT or topic == file.name:
            continue
        for number, lines in enumerate(yaml.safe_load(file.read_text("utf-8"))["conversations"], 1):
            texts = tuple(_dialogue(lines))
            if len(texts) > 1:
                messages = tuple(map(Message, cycle(("user", "assistant")), texts))
                found.setdefault(texts, Conversation(messages, f"{file.name} item {number}"))
    return list(found.values())


def as_typed(one: Conversation) -> Conversation:
    """Return a conversation whose user messages are in lower case and without punctuation marks."""
    unmarked = str.maketrans("", "", _MARKS)
    typed = [
        replace(message, content=message.content.translate(unmarked).lower() or message.content)
        if message.role == "user"
        else message
        for message in one.messages
    ]
    return replace(one, messages=tuple(typed))


def _dialogue(lines: Any) -> Iterator[str]:
    """Yield the texts of a dialogue without a last question that has no answer."""
    texts = [text for line in lines if (text := " ".join(str(line).split()))]
    yield from texts[: len(texts) // 2 * 2]


# ---- Similarity to the packaged conversations: a reward for a run without feedback of people.


def closeness(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return the share of common words with the packaged answer, 0 to 1, for each response.

    It is a source of rewards; a response to a prompt that the package does not have gets 0.
    """
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        answers = _known().get(prompt if isinstance(prompt, str) else prompt[-1].content, ())
        found.append(max((_common(response, one) for one in answers), default=0.0))
    return found


def _common(response: str, answer: str) -> float:
    first, second = _words(response), _words(answer)
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


@cache
def _known() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for one in packaged_conversations():
        for asked, answer in zip(one.messages[::2], one.messages[1::2], strict=True):
            found[asked.content] = (*found.get(asked.content, ()), answer.content)
    return found
