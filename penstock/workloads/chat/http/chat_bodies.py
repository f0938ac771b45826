"""What requests of the page hold. `me` is a secret name that a browser makes for itself."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StringConstraints

from penstock.gateway.surface import NUMERIC, Number, storable

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


class Body(BaseModel):
    """What every request has in common: no other fields than those that it names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
