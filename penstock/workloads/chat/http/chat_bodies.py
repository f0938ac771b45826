"""Bodies of requests of the page. `me` is a secret name that a browser makes for itself."""

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
    """A person."""

    me: Name


class OfTalk(Me):
    """A person's conversation."""

    conversation: Name


class Say(OfTalk):
    """A message; without `text` the last message is answered again."""

    text: Said | None = None


class OfTurn(OfTalk):
    """A rating of an answer. id: of this request; requests with the same id count once."""

    id: Name
    turn: Annotated[int, Field(ge=0, le=10**6), NUMERIC]


class Thumb(OfTurn):
    """Whether a person likes an answer."""

    up: StrictBool


class Stars(OfTurn):
    """A rating of one aspect of an answer."""

    key: Key
    stars: Annotated[int, Field(ge=1, le=5), NUMERIC]


class Correction(OfTurn):
    """A better text for an answer."""

    text: Said


class Prefer(OfTurn):
    """Which of two answers to the same message a person prefers."""

    better: Literal["first", "second"]


class Reasoned(Body):
    """The reason of an operator's action, for the audit."""

    reason: Why


class Weigh(Reasoned):
    """Weights of criteria in the loop's reward; the others stay unchanged."""

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


# ---- A conversation on the page: its messages, the answers that can be rated, its person.

Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class AnswerRecord:
    """An answer to the messages before it.

    learned: whether the learner may train on it. thumb: its reward from a thumb; 0: none. rated: the number
    of that thumb's rating. asked: whether its rating was requested. other: the first answer to the same
    messages, where this is the second. chosen: which of the two a person prefers; None: not yet known.
    """

    turn: int
    version: int
    before: tuple[Message, ...]
    message: Message
    learned: bool
    thumb: float = 0.0
    rated: int = 0
    asked: bool = False
    other: "AnswerRecord | None" = None
    chosen: Prefer | None = None

    @property
    def text(self) -> str:
        return str(self.message["content"])


@dataclass(slots=True, kw_only=True, eq=False)
class TalkRecord:
    """A conversation; used by one event loop.

    answers: by their numbers on the page. newest: the answer with which the conversation continues; None: no
    answer yet. turns: the text server's answer of each turn.
    """

    conversation: AsyncConversation
    person: str
    messages: list[Message] = field(default_factory=list)
    answers: dict[int, AnswerRecord] = field(default_factory=dict)
    newest: AnswerRecord | None = None
    turns: dict[int, AnswerRecord] = field(default_factory=dict)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """Return its id on the page, which cannot be guessed."""
        return self.conversation.conversation_id

    @property
    def name(self) -> str:
        """Return its stored name: the id without its secret part."""
        return self.id.rpartition("-")[0]

    def add(self, answer: AnswerRecord) -> int:
        """Continue with a new answer; returns its number.

        Several answers to the same messages may share a turn. The text server holds the newest of them until
        the conversation continues with another one.
        """
        number = len(self.answers)
        self.answers[number] = answer
        self.turns[answer.turn] = answer
        self.take(answer)
        return number

    def take(self, answer: AnswerRecord) -> None:
        self.messages = [*answer.before, answer.message]
        self.newest = answer

    def settle(self) -> None:
        """Make the answer with which it continues that of its turn, unless another one has a reward."""
        if self.newest is None:
            return
        held = self.turns[self.newest.turn]
        if not held.rated and held.message != self.newest.message:
            self.turns[self.newest.turn] = self.newest


# ---- Ratings of answers in the run's registry: stored, shown to their rater, deleted.

THUMB: Final = "thumb"
CORRECTED: Final = "corrected"
SOURCE: Final = "chat"
ASKED_SOURCE: Final = "chat-asked"
"""Source of ratings that were requested."""
_SHOWN: Final = ("prompt", "response", "key", "score", "rejected", "version")
_PAGE: Final = 1000
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
"""NUL, and half of a pair of surrogates."""


def rating_of(
    talk: TalkRecord,
    answer: AnswerRecord,
    body: OfTurn,
    *,
    key: str,
    score: float | None = None,
    rejected: str | None = None,
    response: str | None = None,
) -> Rating:
    """Return the stored form of a rating. response: instead of the answer's text.

    Characters of an answer that PostgreSQL cannot store become U+FFFD.
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
        request_key=f"chat {body.id}",
    )


def _kept(text: str) -> str:
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def store(url: str, policy: str, rating: Rating) -> int:
    """Store a rating, once per request key, and return its number; raises RegistryError."""
    with Registry.open(url, migrate=True) as opened:
        (kept,) = opened.add_ratings(policy, (rating,))
    return kept.number


def ordinals(url: str, policy: str) -> dict[int, int]:
    """Return the numbers of registered versions for people: 1 is the oldest."""
    with Registry.open(url, migrate=True) as opened:
        versions = sorted(one.version for one in opened.list(policy))
    return {version: number for number, version in enumerate(versions, 1)}


def delete(url: str, rater: str) -> int:
    with Registry.open(url, migrate=True) as opened:
        return sum(len(numbers) for numbers in opened.delete_ratings("", rater).values())


def ratings_by(url: str, policy: str, rater: str) -> list[dict[str, Any]]:
    """Return all ratings of a policy by a rater, oldest first, as JSON values."""
    found, after = list[dict[str, Any]](), 0
    with Registry.open(url, migrate=True) as opened:
        while page := opened.ratings(policy, after, _PAGE):
            after = page[-1].number
            found += [_shown(kept) for kept in page if kept.rating.rater == rater]
    return found


def _shown(kept: KeptRating) -> dict[str, Any]:
    of_rating = {name: getattr(kept.rating, name) for name in _SHOWN}
    return {"policy": kept.policy, **of_rating, "created": kept.created.isoformat()}
