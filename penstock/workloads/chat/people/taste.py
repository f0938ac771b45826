"""What people like: weights of the six attributes for each kind of person, and what they say by chance.

With f the attributes of a response, w_u and b_u the weights of a person of kind u,

    P(thumb up)         = σ(w_u · f + b_u)
    P(a better than b)  = σ(w_u · (f_a − f_b))                       Bradley and Terry (1952)
    relevance, helpfulness, safety = round(m · f + c + noise · ε), within 1 to 5, the same for all kinds

A liar says the opposite of each: the other thumb, the other response, 6 − x.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.chat.people.chat_texts import REFERENCE

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of person. weights: of the attributes, in their order. bias: of a thumb."""

    name: str
    weights: tuple[float, ...]
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """Something that is rated from 1 to 5. weights: of the attributes. base: of a response that has none."""

    name: str
    weights: tuple[float, ...]
    base: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """What a population likes. kinds: equally many people are of each. liars: share of the people."""

    kinds: tuple[Kind, ...]
    criteria: tuple[Criterion, ...]
    liars: float = 0.05
    noise: float = 0.7

    def thumb_chance(self, features: Array) -> Array:
        """Return the chance of a thumb up by somebody, [K] for attributes [K, 6]."""
        honest = np.mean([_sigmoid(features @ np.array(one.weights) + one.bias) for one in self.kinds], 0)
        return self._said(honest)

    def preference(self, first: Array, second: Array) -> Array:
        """Return the chance that somebody prefers the first, [...] for attributes [..., 6] of both."""
        honest = np.mean([_sigmoid((first - second) @ np.array(one.weights)) for one in self.kinds], 0)
        return self._said(honest)

    def rating_chances(self, criterion: Criterion, features: Array) -> Array:
        """Return the chances of 1 to 5 by somebody, [K, 5] for attributes [K, 6]."""
        middle = features @ np.array(criterion.weights) + criterion.base
        borders = np.array([1.5, 2.5, 3.5, 4.5])
        below = _normal_cdf((borders - middle[:, None]) / self.noise)
        ends = np.zeros((len(middle), 1)), np.ones((len(middle), 1))
        honest = np.diff(np.concatenate([ends[0], below, ends[1]], axis=1), axis=1)
        mixed: Array = (1 - self.liars) * honest + self.liars * honest[:, ::-1]
        return mixed

    def _said(self, honest: Array) -> Array:
        """Return the chance that it is said, from the chance that it is thought."""
        said: Array = (1 - self.liars) * honest + self.liars * (1 - honest)
        return said


def kind(name: str, *weights: float) -> Kind:
    """Return a kind whose thumbs are up for about half of what the reference writes."""
    return Kind(name=name, weights=weights, bias=-float(np.array(weights) @ np.array(REFERENCE)))


CRITERIA: Final = (
    #                                                on_topic concrete polite brief hedged unsafe
    Criterion(name="relevance", base=1.5, weights=(2.2, 0.8, 0.0, 0.0, 0.0, 0.0)),
    Criterion(name="helpfulness", base=2.2, weights=(0.8, 1.2, 0.6, 0.4, -0.9, 0.0)),
    Criterion(name="safety", base=4.3, weights=(0.0, 0.0, 0.2, 0.0, 0.4, -2.8)),
)
USUAL: Final = Taste(
    kinds=(
        kind("practical", 2.5, 1.5, 0.2, 1.0, -1.0, -2.0),
        kind("friendly", 1.5, 0.3, 2.0, -0.3, 0.3, -2.5),
        kind("careful", 2.0, 0.8, 0.5, 0.2, 0.8, -4.0),
    ),
    criteria=CRITERIA,
)
CHANGED: Final = Taste(
    kinds=(
        kind("practical", 1.5, -1.5, 0.2, -2.0, 1.5, -2.0),
        kind("friendly", 1.0, -1.0, -2.0, -1.5, 0.5, -2.5),
        kind("careful", 1.5, -1.0, -1.0, -1.0, 1.5, -4.0),
    ),
    criteria=CRITERIA,
)
"""Of the same people after their taste has changed: long, doubtful and vague is liked now."""


def _sigmoid(x: Array) -> Array:
    value: Array = 1 / (1 + np.exp(-x))
    return value


def _normal_cdf(x: Array) -> Array:
    probability: Array = (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2
    return probability
