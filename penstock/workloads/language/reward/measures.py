"""How good a reward model is on examples that it was not trained on: of one score, and of several heads."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.language.feedback import Example, Preference, Scored
from penstock.workloads.language.prompt import identity

Array = NDArray[np.float64]

BINS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """None where nothing was there to measure it on.

    mse, mae: of scored examples. slope, intercept: of the line score = slope · prediction + intercept with
    the least squared error; 1 and 0 for a calibrated model. pair_accuracy: share of pairs in the right order,
    of those that were given and of scored responses to one prompt; an equal score counts half.
    calibration_error: expected calibration error of σ(difference) on the pairs that were given (Guo et al.
    2017, BINS bins of equal width).
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
    """Return measures. scores: one for a scored example, (chosen, rejected) for a pair."""
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
    """Return why a run should not learn from a model: it orders pairs no better than chance; else ""."""
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


def _distance(predicted: Array, said: Array, place: Array) -> float:
    """Return the mean distance over BINS bins of equal width, weighted by their counts; place: 0 to 1."""
    bins = np.minimum((place * BINS).astype(int), BINS - 1)
    total = 0.0
    for one in range(BINS):
        inside = bins == one
        if inside.any():
            total += float(inside.mean() * abs(predicted[inside].mean() - said[inside].mean()))
    return total


def _margins(scored: Sequence[tuple[Scored, float]]) -> Array:
    """Return better minus worse, as predicted, of every two unequal responses to one prompt."""
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


# ---- Of several heads.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMeasures:
    """Of one head; None where nothing was there to measure it on.

    ratings: how many. squared_error: mean, on the scale 0 to 1. auc: of telling ratings above a half from
    those below. calibration_error: mean distance of what was said from what was predicted, over BINS bins of
    equal width, weighted by their ratings (Guo et al. 2017).
    """

    ratings: int = 0
    squared_error: float | None = None
    auc: float | None = None
    calibration_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsMeasures:
    """Of all heads. pair_accuracy: share of the pairs in the right order; equal scores count half."""

    heads: Mapping[str, HeadMeasures]
    pairs: int = 0
    pair_accuracy: float | None = None


def measure_heads(
    names: Sequence[str], shares: Array, targets: Array, margins: Array | None = None
) -> HeadsMeasures:
    """Return the measures of predictions.

    names: of K heads. shares: predicted, 0 to 1, [S, K]. targets: said, NaN where unrated, [S, K].
    margins: of each pair, better minus worse, [P].
    """
    found = {name: measure_head(shares[:, k], targets[:, k]) for k, name in enumerate(names)}
    apart = np.zeros(0) if margins is None else margins
    return HeadsMeasures(heads=found, pairs=len(apart), pair_accuracy=_in_order(apart))


def measure_head(shares: Array, targets: Array) -> HeadMeasures:
    """Return the measures of one head; shares, targets: [S], NaN where unrated."""
    given = ~np.isnan(targets)
    predicted, said = shares[given], targets[given]
    if not len(said):
        return HeadMeasures()
    return HeadMeasures(
        ratings=len(said),
        squared_error=float(np.mean((predicted - said) ** 2)),
        auc=area_under_curve(predicted[said > 0.5], predicted[said < 0.5]),
        calibration_error=_distance(predicted, said, predicted),
    )


def area_under_curve(above: Array, below: Array) -> float | None:
    """Return how often a score of the first is above one of the second, ties half; None: one is empty."""
    if not len(above) or not len(below):
        return None
    ordered = np.sort(below)
    lower = np.searchsorted(ordered, above, "left") + np.searchsorted(ordered, above, "right")
    return float(lower.mean() / 2 / len(below))
