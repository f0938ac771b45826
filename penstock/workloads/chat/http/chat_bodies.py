"""What requests of the page hold. `me` is a secret name that a browser makes for itself."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StrictBool, StringConstraints

from penstock.client.asynchronous import AsyncConversation
from penstock.gateway.frame.requests import NUMERIC, Body, Number, storable
from penstock.registry.ratings import KeptRating, Rating
from penstock.registry.registry import Registry

MAX_CHARACTERS: Final = 4000
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{8,160}$")]
Said = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_CHARACTERS),
    AfterValidator(storable),
]
Why = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500), AfterValidator(storable)
]
Key = Literal["relevance", "helpfulness", "safety"]


class Me(Body):
    """Somebody."""

    me: Name


class OfTalk(Me):
    """Somebody's conversation."""

    conversation: Name


class Say(OfTalk):
    """Something said; `text` absent: the last answer once more."""

    text: Said | None = None


class OfTurn(OfTalk):
    """An answer. id: of this request; the same one counts once."""

    id: Name
    turn: Annotated[int, Field(ge=0, le=10**6), NUMERIC]


class Thumb(OfTurn):
    """Whether somebody likes an answer."""

    up: StrictBool


class Stars(OfTurn):
    """What somebody thinks of one side of an answer."""

    key: Key
    stars: Annotated[int, Field(ge=1, le=5), NUMERIC]


class Correction(OfTurn):
    """What an answer should have been."""

    text: Said


class Prefer(OfTurn):
    """Which of the two answers to the same message somebody prefers."""

    better: Literal["first", "second"]


class Reasoned(Body):
    """Why somebody who looks after the chat does something, for the audit."""

    reason: Why


class Weigh(Reasoned):
    """What criteria count in the reward of the loop; those that are not named stay as they are."""

    weights: Annotated[
        dict[
            Annotated[str, StringConstraints(min_length=1, max_length=64)],
            Annotated[Number, Field(ge=0, allow_inf_nan=False)],
        ],
        Field(min_length=1, max_length=32),
    ]


class OfVersion(Reasoned):
    """A version of the chat."""

    version: Annotated[int, Field(ge=1, lt=2**53), NUMERIC]


# ---- One conversation as the page has it: what was said, which answers may be rated, who talks.

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
        self.messages = [*answer.before, answer.message]
        self.newest = answer

    def settle(self) -> None:
        """Something else is said: the newest answer is that of its turn, unless the first has a reward."""
        if self.newest is None:
            return
        first = self.turns[self.newest.turn]
        if not first.rated and first.message != self.newest.message:
            self.turns[self.newest.turn] = self.newest


# ---- What people have said of answers, in the registry of the run: kept, shown to its person, deleted.

THUMB: Final = "thumb"
CORRECTED: Final = "corrected"
SOURCE: Final = "chat"
ASKED_SOURCE: Final = "chat-asked"
"""Of ratings that somebody was asked for."""
_SHOWN: Final = ("prompt", "response", "key", "score", "rejected", "version")
_PAGE: Final = 1000
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
"""NUL, and half of a pair of surrogates."""


def rating_of(
    talk: TalkRecord,
    answer: Answered,
    body: OfTurn,
    *,
    key: str,
    score: float | None = None,
    rejected: str | None = None,
    response: str | None = None,
) -> Rating:
    """Return what is kept of somebody's opinion of an answer. response: in place of what was answered.

    A model may say characters that no PostgreSQL holds; they are kept as U+FFFD, and its answer is not lost.
    """
    return Rating(
        prompt=[{"role": str(one["role"]), "content": _kept(str(one["content"]))} for one in answer.before],
        response=_kept(answer.text if response is None else response),
        score=score,
        rejected=None if rejected is None else _kept(rejected),
        key=key,
        source=ASKED_SOURCE if answer.asked else SOURCE,
        conversation=talk.name,
        version=answer.version or None,
        rater=talk.person,
        request_key=f"chat-{body.id}",
    )


def _kept(text: str) -> str:
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def store(url: str, policy: str, rating: Rating) -> int:
    """Keep a rating, once by its request key, and return its number; raises RegistryError."""
    with Registry.open(url, migrate=True) as opened:
        (kept,) = opened.add_ratings(policy, (rating,))
    return kept.number


def delete(url: str, rater: str) -> int:
    with Registry.open(url, migrate=True) as opened:
        return sum(len(numbers) for numbers in opened.delete_ratings("", rater).values())


def ratings_by(url: str, policy: str, rater: str) -> list[dict[str, Any]]:
    """Return all that somebody has said of a policy's answers, oldest first, as JSON values."""
    found, after = list[dict[str, Any]](), 0
    with Registry.open(url, migrate=True) as opened:
        while page := opened.ratings(policy, after, _PAGE):
            after = page[-1].number
            found += [_shown(kept) for kept in page if kept.rating.rater == rater]
    return found


def _shown(kept: KeptRating) -> dict[str, Any]:
    of_rating = {name: getattr(kept.rating, name) for name in _SHOWN}
    return {"policy": kept.policy, **of_rating, "created": kept.created.isoformat()}
