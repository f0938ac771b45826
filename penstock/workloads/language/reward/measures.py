"""How good a reward model is on examples that it was not trained on."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.language.feedback.examples import Example, Preference, Scored
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

    def as_dict(self) -> dict[str, Any]:
        """Return the measures by name, as JSON holds them."""
        return asdict(self)


def measure(examples: Sequence[Example], scores: Sequence[tuple[float, ...]]) -> Measures:
    """Return measures of a model that gives these scores.

    scores: one for a scored example, (chosen, rejected) for a pair.
    """
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
        pair_accuracy=float(np.mean((np.sign(margins) + 1) / 2)) if len(margins) else None,
        calibration_error=expected_calibration_error(given_pairs) if len(given_pairs) else None,
    )


def doubt(found: Mapping[str, Any] | None) -> str:
    """Return why a run should not learn from a model with these measures (`Measures.as_dict`).

    "" where they give no reason.

    That is: its order of the validation pairs is less than two standard errors better than a coin's.
    """
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
    """Return the mean distance of confidence σ(|margin|) from how often the order is right.

    The mean is over bins, weighted by their pairs.
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (np.sign(margins) + 1) / 2
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    total = 0.0
    for one in range(BINS):
        inside = bins == one
        if inside.any():
            total += float(inside.mean() * abs(confidence[inside].mean() - right[inside].mean()))
    return total


def _margins(scored: Sequence[tuple[Scored, float]]) -> Array:
    """Return the predicted difference, better minus worse, of every two responses to one prompt.

    Two responses of equal score are left out.
    """
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


def _line(predicted: Array, truth: Array) -> tuple[float | None, float | None]:
    if len(predicted) < 2 or np.ptp(predicted) == 0:
        return None, None
    slope, intercept = np.polyfit(predicted, truth, 1)
    return float(slope), float(intercept)
