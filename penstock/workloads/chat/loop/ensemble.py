"""An ensemble of heads for the thumb, each of which learns from half of the prompts. It says where to ask.

A member is a head like every other, of weight 0 in the reward, for which half of the thumbs have no score. So
all of them are trained in one pass, with one adapter. Which half is a matter of the prompt and of the member
alone: a round that is taken up again trains the same ones.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from penstock.workloads.chat.ratings.rating_filter import Row
from penstock.workloads.language.feedback.split import place_of
from penstock.workloads.language.prompt import identity, parse_prompt

OF: Final = "thumb"
MEMBERS: Final = tuple(f"{OF}-{number}" for number in range(1, 5))
_SCALE: Final = "thumbs"


def with_members(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows, and behind each thumb one for each member that learns from it."""
    for row in rows:
        yield row
        if row.get("key") == OF and row.get("score") is not None:
            for number, name in enumerate(MEMBERS):
                if _learns(number, row):
                    yield {**row, "key": name}


def member_heads(heads: Sequence[str]) -> list[str]:
    """Return NAME=SCALE of the members where thumbs are among these heads; else none."""
    return [f"{name}={_SCALE}" for name in MEMBERS] if f"{OF}={_SCALE}" in heads else []


def member_weights(heads: Sequence[str]) -> list[str]:
    """Return NAME=NUMBER that leaves these members out of the reward."""
    return [f"{one.partition('=')[0]}=0" for one in heads]


def disagreement(shares: Mapping[str, float]) -> float | None:
    """Return the deviation of what the members expect, 0 to 0.5; None of a model without them."""
    found = [shares[name] for name in MEMBERS if name in shares]
    return statistics.pstdev(found) if len(found) == len(MEMBERS) else None


def told(shares: Mapping[str, float]) -> dict[str, float]:
    """Return what is expected without what the members expect."""
    return {name: share for name, share in shares.items() if name not in MEMBERS}


def _learns(number: int, row: Row) -> bool:
    try:
        name = identity(parse_prompt(row.get("prompt")))
    except ValueError:
        return False  # the training says what is wrong with it
    return place_of(name, number + 1)[0] % 2 == 0
