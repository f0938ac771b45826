"""Sentiment words: the best reward model and the best policy, exactly."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.rlhf.sentiment import Sentiment, true_reward

Array = NDArray[np.float64]


def pairs(task: Sentiment, rng: np.random.Generator, count: int) -> Iterator[dict[str, Any]]:
    """Rows of feedback that prefer a to b where r(a) + noise · ε > r(b) + noise · ε'."""
    while count:
        both = [task.response(rng), task.response(rng)]
        if both[0] == both[1]:
            continue
        first, second = (true_reward(one) + task.noise * rng.standard_normal() for one in both)
        chosen, rejected = both if first > second else reversed(both)
        yield {"prompt": task.prompt(rng), "chosen": chosen, "rejected": rejected}
        count -= 1


class Distribution(NamedTuple):
    """Values of the true reward, rising, and their chances: float64 [K] each."""

    values: Array
    chances: Array


class Optimum(NamedTuple):
    """Of the policy that maximises E[r] − β · KL(π ‖ π_ref). kl: in nats. value: what it maximises."""

    reward: float
    kl: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSentiment(Sentiment):
    """The task, and the best that any model can tell of what people say."""

    def expected_score(self, reward: Array) -> Array:
        """E[x | r]: the prediction of least squared error. [K] → [K]."""
        return _clipped_normal(reward, self.noise)[0]

    def bayes_mse(self, of: Distribution | None = None) -> float:
        """Least mean squared error of a prediction of x from y, where rewards are distributed like this."""
        values, chances = of or self.rewards()
        return float(chances @ _clipped_normal(values, self.noise)[1])

    def preference(self, first: Array, second: Array) -> Array:
        """Chance that a response of reward `first` is preferred to one of `second`.

        Thurstone (1927), case V.
        """
        if self.noise == 0:
            return (np.sign(first - second) + 1) / 2
        return _normal_cdf((first - second) / (math.sqrt(2) * self.noise))

    def bayes_pair_accuracy(self, of: Distribution | None = None) -> float:
        """Highest chance to tell which of two independent responses somebody prefers."""
        values, chances = of or self.rewards()
        said = self.preference(values[:, None], values[None, :])
        return float(chances @ np.maximum(said, 1 - said) @ chances)

    def rewards(self) -> Distribution:
        """Of the reference policy: r takes few values, each with the chance of its counts."""
        low, high = self.lengths
        found: dict[float, float] = defaultdict(float)
        for length in range(low, high + 1):
            for up in range(length + 1):
                for down in range(length - up + 1):
                    reward = max(-1.0, min(1.0, (up - down) / length))
                    found[reward] += self._chance(length, up, down) / (high - low + 1)
        values = sorted(found)
        return Distribution(np.array(values), np.array([found[value] for value in values]))

    def _chance(self, length: int, up: int, down: int) -> float:
        """Of so many positive and negative words among `length`: multinomial."""
        rest = length - up - down
        ways = math.comb(length, up) * math.comb(length - up, down)
        neutral = 1 - self.positive - self.negative
        return ways * self.positive**up * self.negative**down * neutral**rest


def optimal(reference: Array, rewards: Array, beta: float) -> Array:
    """Return the policy that maximises E[r] − β · KL(π ‖ π_ref) over all policies.

    π*(y) ∝ π_ref(y) · exp(r(y) / β).   reference: [K].   rewards: [K].   Returns [K].
    """
    tilted = reference * np.exp((rewards - rewards.max()) / beta)
    best: Array = tilted / tilted.sum()
    return best


def optimum(reference: Distribution, beta: float) -> Optimum:
    """Return what that policy reaches.

    Responses of equal reward are tilted alike, so their rewards are enough.
    """
    values, chances = reference
    best = optimal(chances, values, beta)
    reward = float(best @ values)
    normaliser = float(chances @ np.exp((values - values.max()) / beta))
    value = beta * math.log(normaliser) + float(values.max())  # β · log Z
    return Optimum(reward=reward, kl=(reward - value) / beta, value=value)


def expected_pair_accuracy(
    task: KnownSentiment, responses: Sequence[str], scores: Sequence[float]
) -> tuple[float, float]:
    """Return how often the order of `scores` agrees with an opinion, over all pairs, and its ceiling.

    Both are expected values over the noise of the opinions, so only the scores are judged. Equal scores agree
    in half of the cases.
    """
    rewards = np.array([true_reward(response) for response in responses])
    given = np.asarray(scores, np.float64)
    first, second = np.triu_indices(len(rewards), k=1)
    said = task.preference(rewards[first], rewards[second])
    order = (np.sign(given[first] - given[second]) + 1) / 2
    accuracy = order * said + (1 - order) * (1 - said)
    return float(accuracy.mean()), float(np.maximum(said, 1 - said).mean())


def _clipped_normal(mean: Array, deviation: float) -> tuple[Array, Array]:
    """Mean and variance of clip(N(mean, deviation²), −1, 1): of a normal variable censored on both sides."""
    if deviation == 0:
        return np.clip(mean, -1, 1), np.zeros_like(mean)
    low, high = (-1 - mean) / deviation, (1 - mean) / deviation
    below, above = _normal_cdf(low), 1 - _normal_cdf(high)
    inside = 1 - below - above
    density_low, density_high = _normal_pdf(low), _normal_pdf(high)
    # E[z 1{low<z<high}] and E[z² 1{…}] of a standard normal z.
    first = density_low - density_high
    second = inside + low * density_low - high * density_high
    expected = -below + above + mean * inside + deviation * first
    squared = below + above + mean**2 * inside + 2 * mean * deviation * first + deviation**2 * second
    return expected, squared - expected**2


def _normal_pdf(x: Array) -> Array:
    density: Array = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return density


def _normal_cdf(x: Array) -> Array:
    probability: Array = (1 + np.vectorize(math.erf, otypes=[np.float64])(np.asarray(x) / math.sqrt(2))) / 2
    return probability
