"""What several heads learn (`relevance=stars`, `thumb=thumbs`, `charm=0:10`), and what calibrates them.

Beside these every such network has one more head, which learns which of two responses is better.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback import (
    BadRows,
    Example,
    Feedback,
    Judged,
    Preference,
    Row,
    Scale,
    Split,
    check_some,
    is_pair,
    made_of,
    place_of,
    preference_of,
    present,
    response_of,
    rows_of,
    scale_of,
)
from penstock.workloads.language.prompt import identity, parse_prompt

PREFERRED: Final = "preferred"
"""The name of the head that compares."""
MAX_HEADS: Final = 32


@dataclass(frozen=True, slots=True)
class Head:
    """Something that is rated. name: as the `key` of rows."""

    name: str
    scale: Scale

    @property
    def is_choice(self) -> bool:
        return self.scale.name == "thumbs"

    def share(self, raw: Any) -> float:
        """Return a rating of its scale as 0 to 1; raises ValueError that says why it is none."""
        return (self.scale.to_score(raw) + 1) / 2


def parse_heads(texts: Sequence[str]) -> tuple[Head, ...]:
    """Return the heads that `NAME=SCALE` texts declare."""
    heads = tuple(map(_parse, texts))
    names = [one.name for one in heads]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"head {name!r}: is declared twice")
    if not 1 <= len(heads) <= MAX_HEADS:
        raise ConfigurationError(f"{len(heads)} heads: declare 1 to {MAX_HEADS}, as NAME=SCALE")
    return heads


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Return the weights of heads in the reward of `NAME=NUMBER` texts; the last of a name counts."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            weights[name] = float(number)
        except ValueError as error:
            raise ConfigurationError(f"--weight {text!r}: write NAME=NUMBER, such as relevance=2") from error
        if not 0 <= weights[name] < float("inf"):
            raise ConfigurationError(f"--weight {text!r}: must be 0 or more, and finite")
    return weights


def reward_weights(heads: Sequence[Head], said: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each head in the reward: what was said, else 1, and 0 for that of pairs."""
    weights = {**{one.name: 1.0 for one in heads}, PREFERRED: 0.0}
    for name, value in (said or {}).items():
        if name not in weights:
            raise ConfigurationError(
                f"weight {name}={value:g}: there is no such head; use {', '.join(weights)}"
            )
        if not 0 <= value < float("inf"):
            raise ConfigurationError(f"weight {name}={value:g}: must be 0 or more, and finite")
        weights[name] = float(value)
    total = sum(weights.values())
    if not total:
        raise ConfigurationError("all weights are 0: give at least one head a weight above 0")
    if total == float("inf"):
        raise ConfigurationError("the weights have no finite sum: make them smaller, for their ratio counts")
    return weights


def _parse(text: str) -> Head:
    name, _, scale = text.partition("=")
    if not name or not scale or name == PREFERRED:
        raise ConfigurationError(
            f"head {text!r}: write NAME=SCALE, such as relevance=stars; {PREFERRED!r} is the head of pairs"
        )
    found = scale_of(scale, f"head {text!r}: ")
    if found.name == "none":
        raise ConfigurationError(f"head {text!r}: a head gives 0 to 1, so its scale has bounds; use LOW:HIGH")
    return Head(name, found)


# ---- What makes a head's number the share of people who say yes: σ(slope · z + shift), after Platt (1999).

Array = NDArray[np.float64]

LEAST: Final = 30
"""Fewest ratings by which a head is calibrated; below, its numbers stay as they are."""
_STEPS: Final = 50
_RIDGE: Final = 1e-3
"""Pulls slope to 1 and shift to 0, by as much as a thousandth of a rating would: a finite optimum always."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A line under a sigmoid."""

    slope: float = 1.0
    shift: float = 0.0

    def share(self, logits: Array) -> Array:
        value: Array = 1 / (1 + np.exp(-np.clip(self.slope * logits + self.shift, -60, 60)))
        return value


def calibrate(logits: Array, said: Array) -> Calibration:
    """Return the calibration of a head by its numbers and what was said, [S] each, NaN where unrated.

    No change where fewer than LEAST were rated, or where it would turn the order around.
    """
    given = ~np.isnan(said)
    if given.sum() < LEAST:
        return Calibration()
    x = np.stack([logits[given], np.ones(int(given.sum()))], 1)
    weights = np.array([1.0, 0.0])
    for _ in range(_STEPS):
        shares = 1 / (1 + np.exp(-np.clip(x @ weights, -60, 60)))
        gradient = x.T @ (shares - said[given]) + _RIDGE * (weights - [1.0, 0.0])
        curvature = (x * (shares * (1 - shares))[:, None]).T @ x + _RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
    return Calibration(float(weights[0]), float(weights[1])) if weights[0] > 0 else Calibration()


# ---- Feedback of several kinds as what a network of several heads learns from.


Opinion = Judged | Preference


def read_opinions(place: str, heads: Sequence[Head], part: str | None = None) -> Feedback:
    """Return the opinions at a place of feedback. part: split of a dataset or policy of a registry."""
    found = to_opinions(rows_of(place, part), heads)
    check_some(place, found.examples, found.bad, found.other_key, ", ".join(one.name for one in heads))
    return found


def to_opinions(rows: Iterable[Row], heads: Sequence[Head]) -> Feedback:
    """Return the opinions in rows: pairs, and all that one rater said of a response as one."""
    by_name = {one.name: one for one in heads}
    bad, other_key = BadRows(), 0
    of_rater: dict[tuple[str, str, str], Judged] = {}

    def make(where: str, row: Any) -> Opinion | None:
        nonlocal other_key
        prompt = parse_prompt(row.get("prompt"))
        if is_pair(row):
            return preference_of(row, prompt, where)
        head = by_name.get(row.get("key") or "")
        if head is None:
            other_key += 1
            return None
        share, response = head.share(present(row, "score")), response_of(row, "response")
        # Without a rater it is unknown whether two rows are of one person.
        key = (str(row.get("rater") or where), identity(prompt), response)
        is_new = key not in of_rater
        judged = of_rater.setdefault(key, Judged(prompt=prompt, response=response, where=where))
        judged.shares[head.name] = share
        return judged if is_new else None

    found = tuple(one for one in made_of(rows, bad, make) if one is not None)
    return Feedback(found, bad, other_key)


def split_opinions(opinions: Sequence[Example], *, share: float, seed: int) -> Split:
    """Return about `share` of the prompts, with all that was said of them, for validation; 0: none."""
    sides: tuple[list[Example], list[Example]] = [], []
    border = int(share * 2**64)
    for one in opinions:
        place = int.from_bytes(place_of(identity(one.prompt), seed)[:8], "big")
        sides[place < border].append(one)
    return Split(tuple(sides[0]), tuple(sides[1]))
