"""Conversations of a package: small talk, trivia, questions about computers.

The package is chatterbot-corpus, of the extra `data`. Each has a question of somebody and an answer to it,
and some go on. Left out are code, whose answers are long, and the thousand questions of technical support,
which would leave a small model little else to say.
"""

import importlib.resources
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.pretraining.conversation_files import Conversation
from penstock.workloads.language.prompt import Message

PACKAGE: Final = "chatterbot_corpus"
_LEFT_OUT: Final = frozenset({"coding", "tech_support"})
_MARKS: Final = ".?!,;:"


def packaged_conversations() -> list[Conversation]:
    """Return the conversations of the package, each once; raises ConfigurationError where there is none."""
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
            said = tuple(_said(lines))
            if len(said) > 1:
                found.setdefault(said, Conversation(_messages(said), f"{file.name} item {number}"))
    return list(found.values())


def as_typed(one: Conversation) -> Conversation:
    """Return a conversation with what people say as many type it: in small letters, without marks."""
    return replace(
        one,
        messages=tuple(
            replace(message, content=_typed(message.content)) if message.role == "user" else message
            for message in one.messages
        ),
    )


def _typed(text: str) -> str:
    return "".join(letter for letter in text if letter not in _MARKS).lower() or text


def _said(lines: Any) -> Iterator[str]:
    """Yield the texts of a dialogue, an even number of them: what has no answer is left out."""
    texts = [text for line in lines if (text := " ".join(str(line).split()))]
    yield from texts[: len(texts) // 2 * 2]


def _messages(said: tuple[str, ...]) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return tuple(Message(roles[place % 2], text) for place, text in enumerate(said))
