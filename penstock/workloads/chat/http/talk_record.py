"""One conversation as the page has it: what was said, which answers may be rated, who talks."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.client.text_async import AsyncConversation
from penstock.workloads.chat.http.chat_bodies import Prefer

Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Answered:
    """An answer to the messages before it. thumb: the reward that it has by a thumb; 0: none.

    rated: the number of the rating that this thumb is. learned: whether it may go to the learner. asked:
    whether somebody was asked about it. other: what was answered to the same messages first, where it was
    asked for once more. chosen: which of the two somebody said is better; None: nobody has yet.
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
    chosen: Prefer | None = None

    @property
    def text(self) -> str:
        """Return what it says."""
        return str(self.message["content"])


@dataclass(slots=True, kw_only=True, eq=False)
class TalkRecord:
    """Used by one event loop.

    person: who talks. answers: by the number that the page has for each. newest: the one that it goes on
    with; None: there is none yet. turns: by turn, the answer that the text server has for it.
    """

    conversation: AsyncConversation
    person: str
    messages: list[Message] = field(default_factory=list)
    answers: dict[int, Answered] = field(default_factory=dict)
    newest: Answered | None = None
    turns: dict[int, Answered] = field(default_factory=dict)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """Return what the page calls it, which cannot be guessed."""
        return self.conversation.conversation_id

    @property
    def name(self) -> str:
        """Return what books call it: the id without the part that cannot be guessed."""
        return self.id.rpartition("-")[0]

    def add(self, answer: Answered) -> int:
        """Go on with a new answer; returns its number.

        Several to the same messages may be of one turn, of which the text server has the first until the
        conversation goes on with another one.
        """
        number = len(self.answers)
        self.answers[number] = answer
        self.turns.setdefault(answer.turn, answer)
        self.take(answer)
        return number

    def take(self, answer: Answered) -> None:
        """Go on with an answer, in place of another one to the same messages where there is one."""
        self.messages = [*answer.before, answer.message]
        self.newest = answer

    def settle(self) -> None:
        """Something else is said: the newest answer is that of its turn, unless the first has a reward."""
        if self.newest is None:
            return
        first = self.turns[self.newest.turn]
        if not first.rated and first.message != self.newest.message:
            self.turns[self.newest.turn] = self.newest
