"""The heads of a reward model (`relevance=stars`, `thumb=thumbs`, `charm=0:10`), and measures of a model.

A network of heads has one more head, which learns which of two responses is better. Measures and calibrations
are computed on examples that the model was not trained on.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

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
    Scored,
    Split,
    check_some,
    is_pair,
    key_of,
    made_of,
    place_of,
    preference_of,
    present,
    response_of,
    rows_of,
    scale_of,
)
from penstock.workloads.language.prompt import identity, parse_prompt
from penstock.workloads.plugin.logistic import fit_logistic, sigmoid

PREFERRED: Final = "preferred"
"""Name of the head that compares two responses."""
MAX_HEADS: Final = 32


@dataclass(frozen=True, slots=True)
class Head:
    """A head, which predicts the ratings of one key. name: the `key` of its rows."""

    name: str
    scale: Scale

    @property
    def is_choice(self) -> bool:
        return self.scale.name == "thumbs"

    def share(self, raw: Any) -> float:
        """Return a rating, mapped to 0 to 1; raises ValueError for one that is not on the scale."""
        return (self.scale.to_score(raw) + 1) / 2


def parse_heads(texts: Sequence[str]) -> tuple[Head, ...]:
    """Return the heads of `NAME=SCALE` texts; raises ConfigurationError."""
    heads = tuple(map(_parse, texts))
    names = [one.name for one in heads]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"head {name!r}: is declared twice")
    if not 1 <= len(heads) <= MAX_HEADS:
        raise ConfigurationError(f"{len(heads)} heads: declare 1 to {MAX_HEADS}, as NAME=SCALE")
    return heads


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Return the heads' weights in the reward by `NAME=NUMBER` texts; of two of a name the last counts."""
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


def reward_weights(heads: Sequence[Head], given: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each head in the reward: the given one, else 1, and 0 for the head of pairs."""
    weights = {**{one.name: 1.0 for one in heads}, PREFERRED: 0.0}
    for name, value in (given or {}).items():
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


# ---- Calibration (Platt 1999): of an output z, σ(slope · z + shift) is the share of people who say yes.

Array = NDArray[np.float64]

LEAST: Final = 30
"""Fewest ratings for which a head is calibrated."""
_RIDGE: Final = 1e-3
"""Weight of a penalty that pulls slope to 1 and shift to 0, so that there is always a finite optimum."""


class Calibration(NamedTuple):
    """Slope and shift of the line whose sigmoid is the calibrated share."""

    slope: float = 1.0
    shift: float = 0.0

    def share(self, logits: Array) -> Array:
        return sigmoid(self.slope * logits + self.shift)


def calibrate(logits: Array, ratings: Array) -> Calibration:
    """Return the calibration of a head.

    logits: float [S], the head's outputs. ratings: 0 to 1, float [S], NaN where unrated. The result changes
    nothing where fewer than LEAST are rated, or where it would reverse the order.
    """
    given = ~np.isnan(ratings)
    if given.sum() < LEAST:
        return Calibration()
    x = np.stack([logits[given], np.ones(int(given.sum()))], 1)
    weights = fit_logistic(x, ratings[given], np.full(2, _RIDGE), np.array(Calibration()))
    return Calibration(float(weights[0]), float(weights[1])) if weights[0] > 0 else Calibration()


# ---- Feedback of several kinds as examples for a network of several heads.


Opinion = Judged | Preference


def read_opinions(place: str, heads: Sequence[Head], part: str | None = None) -> Feedback:
    found = to_opinions(rows_of(place, part), heads)
    check_some(place, found.examples, found.bad, found.other_key, ", ".join(one.name for one in heads))
    return found


def to_opinions(rows: Iterable[Row], heads: Sequence[Head]) -> Feedback:
    """Return the opinions in rows: pairs, and for each rater and response one example with all ratings."""
    by_name = {one.name: one for one in heads}
    bad, other_key = BadRows(), 0
    of_rater: dict[tuple[str, str, str], Judged] = {}

    def make(where: str, row: Any) -> Opinion | None:
        nonlocal other_key
        prompt = parse_prompt(row.get("prompt"))
        if is_pair(row):
            return preference_of(row, prompt, where)
        head = by_name.get(key_of(row))
        if head is None:
            other_key += 1
            return None
        share, response = head.share(present(row, "score")), response_of(row, "response")
        # A row without a rater is an example alone: two such rows may be of two people.
        key = (str(row.get("rater") or where), identity(prompt), response)
        is_new = key not in of_rater
        judged = of_rater.setdefault(key, Judged(prompt=prompt, response=response, where=where))
        judged.shares[head.name] = share
        return judged if is_new else None

    found = tuple(one for one in made_of(rows, bad, make) if one is not None)
    return Feedback(found, bad, other_key)


def split_opinions(opinions: Sequence[Example], *, share: float, seed: int) -> Split:
    """Return a split with about `share` of the prompts, and all opinions on them, for validation."""
    sides: tuple[list[Example], list[Example]] = [], []
    border = int(share * 2**64)
    for one in opinions:
        place = int.from_bytes(place_of(identity(one.prompt), seed)[:8], "big")
        sides[place < border].append(one)
    return Split(tuple(sides[0]), tuple(sides[1]))


# ---- Measures of a model of one score.


BINS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Measures of a model of one score; None where there were no examples for one.

    mse, mae: mean squared and absolute error on scored examples. slope, intercept: of the line
    score = slope · prediction + intercept with the least squared error; 1 and 0 for a calibrated model.
    pair_accuracy: share of pairs in the right order, over given pairs and pairs of scored responses to one
    prompt; equal scores count half. calibration_error: expected calibration error of σ(difference) on the
    given pairs (Guo et al. 2017, BINS bins of equal width).
    """

    scored: int = 0
    mse: float | None = None
    mae: float | None = None
    slope: float | None = None
    intercept: float | None = None
    pairs: int = 0
    pair_accuracy: float | None = None
    calibration_error: float | None = None


def measure(examples: Sequence[Example], scores: Sequence[tuple[float, ...]]) -> Measures:
    """Return the measures. scores: one score for a scored example, (chosen, rejected) for a pair."""
    both = list(zip(examples, scores, strict=True))
    scored = [(example, given[0]) for example, given in both if isinstance(example, Scored)]
    given_pairs = np.array(
        [given[0] - given[1] for example, given in both if isinstance(example, Preference)], np.float64
    )
    margins = np.concatenate([given_pairs, _margins(scored)])
    truth = np.array([example.score for example, _ in scored], np.float64)
    predicted = np.array([score for _, score in scored], np.float64)
    slope, intercept = _line(predicted, truth)
    return Measures(
        scored=len(scored),
        mse=float(np.mean((predicted - truth) ** 2)) if scored else None,
        mae=float(np.mean(np.abs(predicted - truth))) if scored else None,
        slope=slope,
        intercept=intercept,
        pairs=len(margins),
        pair_accuracy=_in_order(margins),
        calibration_error=expected_calibration_error(given_pairs) if len(given_pairs) else None,
    )


def doubt(found: Mapping[str, Any] | None) -> str:
    """Return why a run should not learn from a model that orders pairs no better than chance; else ""."""
    if not found or not found["pairs"]:
        return ""
    pairs, accuracy = found["pairs"], found["pair_accuracy"]
    margin = 1 / math.sqrt(pairs)
    if accuracy - 0.5 > margin:
        return ""
    return (
        f"pair_accuracy {accuracy:.3g} of {pairs} pairs is what chance gives (0.5 ± {margin:.2g}): a policy "
        "would learn noise; give the reward model more feedback, more epochs, a larger learning_rate or rank"
    )


def expected_calibration_error(margins: Array) -> float:
    """Return the mean distance of confidence σ(|margin|) from how often the order is right."""
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    return _distance(confidence, (np.sign(margins) + 1) / 2, (confidence - 0.5) * 2)


def _distance(predicted: Array, observed: Array, place: Array) -> float:
    """Return the mean distance over BINS bins of equal width, weighted by their counts; place: 0 to 1."""
    bins = np.minimum((place * BINS).astype(int), BINS - 1)
    total = 0.0
    for one in range(BINS):
        inside = bins == one
        if inside.any():
            total += float(inside.mean() * abs(predicted[inside].mean() - observed[inside].mean()))
    return total


def _margins(scored: Sequence[tuple[Scored, float]]) -> Array:
    """Return the predicted margin, better minus worse, of every two unequal responses to one prompt."""
    of_prompt: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for example, predicted in scored:
        of_prompt[identity(example.prompt)].append((example.score, predicted))
    found = [
        (first[1] - second[1]) * (1 if first[0] > second[0] else -1)
        for responses in of_prompt.values()
        for first, second in combinations(responses, 2)
        if first[0] != second[0]
    ]
    return np.array(found, np.float64)


def _in_order(margins: Array) -> float | None:
    return float(np.mean((np.sign(margins) + 1) / 2)) if len(margins) else None


def _line(predicted: Array, truth: Array) -> tuple[float | None, float | None]:
    if len(predicted) < 2 or np.ptp(predicted) == 0:
        return None, None
    slope, intercept = np.polyfit(predicted, truth, 1)
    return float(slope), float(intercept)


# ---- Measures of several heads.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMeasures:
    """Measures of one head; None where there were no ratings for one.

    ratings: their number. squared_error: mean, on the scale 0 to 1. auc: area under the ROC curve for ratings
    above a half against those below. calibration_error: mean distance of rated and predicted shares over BINS
    bins of equal width, weighted by their ratings (Guo et al. 2017).
    """

    ratings: int = 0
    squared_error: float | None = None
    auc: float | None = None
    calibration_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsMeasures:
    """Measures of all heads. pair_accuracy: share of pairs in the right order; equal scores count half."""

    heads: Mapping[str, HeadMeasures]
    pairs: int = 0
    pair_accuracy: float | None = None


def measure_heads(
    names: Sequence[str], shares: Array, targets: Array, margins: Array | None = None
) -> HeadsMeasures:
    """Return the measures of predictions.

    names: of K heads. shares: predicted, 0 to 1, [S, K]. targets: rated, 0 to 1, NaN where unrated, [S, K].
    margins: better minus worse of each pair, [P].
    """
    found = {name: measure_head(shares[:, k], targets[:, k]) for k, name in enumerate(names)}
    apart = np.zeros(0) if margins is None else margins
    return HeadsMeasures(heads=found, pairs=len(apart), pair_accuracy=_in_order(apart))


def measure_head(shares: Array, targets: Array) -> HeadMeasures:
    """Return the measures of one head; shares, targets: [S], NaN where unrated."""
    given = ~np.isnan(targets)
    predicted, rated = shares[given], targets[given]
    if not len(rated):
        return HeadMeasures()
    return HeadMeasures(
        ratings=len(rated),
        squared_error=float(np.mean((predicted - rated) ** 2)),
        auc=area_under_curve(predicted[rated > 0.5], predicted[rated < 0.5]),
        calibration_error=_distance(predicted, rated, predicted),
    )


def area_under_curve(above: Array, below: Array) -> float | None:
    """Return how often a score above is larger than one below, ties count half; None: one side is empty."""
    if not len(above) or not len(below):
        return None
    ordered = np.sort(below)
    lower = np.searchsorted(ordered, above, "left") + np.searchsorted(ordered, above, "right")
    return float(lower.mean() / 2 / len(below))
