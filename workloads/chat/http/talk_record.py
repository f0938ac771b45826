"""One conversation as the page has it: what was said, which answers may be rated, who talks."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.client.text_async import AsyncConversation

Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Answered:
    """An answer to the messages before it. thumb: the reward that it has by a thumb; 0: none.

    rated: the number of the rating that this thumb is. learned: whether it may go to the learner. asked:
    whether somebody was asked about it. other: what was answered to the same messages first, where it was
    asked for once more.
    """

    turn: int
    version: int
    before: tuple[Message, ...]
    message: Message
    learned: bool
    thumb: float = 0.0
    rated: int = 0
    asked: bool = False
    other: "Answered | None" = None

    @property
    def text(self) -> str:
        """Return what it says."""
        return str(self.message["content"])


@dataclass(slots=True, kw_only=True, eq=False)
class TalkRecord:
    """Used by one event loop. person: who talks."""

    conversation: AsyncConversation
    person: str
    messages: list[Message] = field(default_factory=list)
    answers: dict[int, Answered] = field(default_factory=dict)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """Return what the page calls it, which cannot be guessed."""
        return self.conversation.conversation_id

    @property
    def name(self) -> str:
        """Return what books call it: the id without the part that cannot be guessed."""
        return self.id.rpartition("-")[0]

    @property
    def newest(self) -> Answered | None:
        """Return the newest answer, None before the first."""
        return self.answers[max(self.answers)] if self.answers else None

    def take(self, answer: Answered) -> None:
        """Go on with an answer, in place of another one to the same messages where there is one."""
        self.messages = [*answer.before, answer.message]
        self.answers[answer.turn] = answer
