"""The best that anybody can tell of what people will say, and what a model reaches of it.

Everything here is an expected value over what people say, given the responses; nothing is drawn.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.chat.people import REFERENCE, Reference, Taste
from penstock.workloads.chat.tasks import CANDIDATES
from tests.support.chat.opinions import (
    CRITERIA,
    FEATURES,
    Criterion,
    preference,
    profile_chances,
    rating_chances,
)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bayes ceilings over responses of a reference.

    auc: of telling thumbs up from thumbs down. pair_accuracy: of telling which of two responses is better.
    squared_error: least mean squared error of each criterion, on the scale 0 to 1.
    """

    auc: float
    pair_accuracy: float
    squared_error: dict[str, float]


def ceilings(taste: Taste, reference: Reference = REFERENCE) -> Ceilings:
    """Return the ceilings of a taste, exactly: a sum over all 64 profiles."""
    chances = profile_chances(reference)
    thumbs = taste.thumb_chance(FEATURES)
    return Ceilings(
        auc=expected_auc(thumbs, thumbs, chances),
        pair_accuracy=_best_pair_accuracy(taste, FEATURES, chances),
        squared_error={
            one.name: float(chances @ expected_rating(taste, one, FEATURES)[1]) for one in CRITERIA
        },
    )


def expected_auc(scores: Array, thumbs: Array, weights: Array | None = None) -> float:
    """Return the area under the ROC curve that scores have over all thumbs that may be given.

    scores: of K responses, [K]. thumbs: the chance of a thumb up for each, [K]. weights: how often each
    comes, [K]; None: equally often. Equal scores count half.
    """
    often = np.ones(len(scores)) if weights is None else weights
    up, down = often * thumbs, often * (1 - thumbs)
    order = (np.sign(scores[:, None] - scores[None, :]) + 1) / 2
    return float(up @ order @ down / (up.sum() * down.sum()))


def expected_pair_accuracy(taste: Taste, scores: Array, features: Array) -> tuple[float, float]:
    """Return how often the order of scores agrees with somebody, over all pairs, and its ceiling.

    scores: of K responses, [K]. features: their attributes, [K, 6]. Equal scores agree in half of the cases.
    """
    first, second = np.triu_indices(len(scores), k=1)
    said = preference(taste, features[first], features[second])
    order = (np.sign(scores[first] - scores[second]) + 1) / 2
    accuracy = order * said + (1 - order) * (1 - said)
    return float(accuracy.mean()), float(np.maximum(said, 1 - said).mean())


def expected_rating(taste: Taste, criterion: Criterion, features: Array) -> tuple[Array, Array]:
    """Return mean and variance of what people say of a criterion on the scale 0 to 1, [K] each.

    The mean is the prediction of least squared error. features: [K, 6].
    """
    values = np.linspace(0, 1, 5)
    chances = rating_chances(taste, criterion, features)
    mean = chances @ values
    return mean, chances @ values**2 - mean**2


def tilted(reference: Array, rewards: Array, beta: float) -> Array:
    """Return the policy that maximises E[r] − β · KL(π ‖ π_ref): π* ∝ π_ref · exp(r / β).

    reference: chances [..., K]. rewards: [..., K]. beta: per nat, positive. Returns [..., K].
    """
    weighed = reference * np.exp((rewards - rewards.max(-1, keepdims=True)) / beta)
    best: Array = weighed / weighed.sum(-1, keepdims=True)
    return best


def best_policy(rewards: Array, beta: float) -> Array:
    """Return the chances of the best policy beside an even one.

    rewards: [PROMPTS, CANDIDATES]. beta: weight of the distance to the even policy, per nat. Returns
    [PROMPTS, CANDIDATES].
    """
    return tilted(np.full_like(rewards, 1 / CANDIDATES), rewards, beta)


def total_variation(first: Array, second: Array) -> Array:
    """Return half of the absolute differences of two policies, for each prompt: [PROMPTS]."""
    apart: Array = np.abs(first - second).sum(-1) / 2
    return apart


def _best_pair_accuracy(taste: Taste, features: Array, chances: Array) -> float:
    """Return the ceiling over two independent responses; of equal profiles either may be preferred."""
    said = preference(taste, features[:, None, :], features[None, :, :])
    return float(chances @ np.maximum(said, 1 - said) @ chances)
