"""Action distributions: how the network's outputs become actions, log-probabilities and entropies.

Each leaf of the action space has a head of its own.
"""

import math

import numpy as np

from penstock.config.settings import PolicySection
from penstock.policy.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from penstock.policy.distributions.epsilon_greedy import EpsilonGreedy
from penstock.policy.distributions.gaussian import ConditionalSquashedGaussian, Gaussian, SquashedGaussian
from penstock.policy.distributions.head import ActionHead, Place, Reals
from penstock.wire.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete

__all__ = [
    "ActionHead",
    "Bernoulli",
    "Categorical",
    "ConditionalSquashedGaussian",
    "EpsilonGreedy",
    "Gaussian",
    "MultiCategorical",
    "Place",
    "Reals",
    "SquashedGaussian",
    "head_of",
]


def head_of(path: str, leaf: Leaf, section: PolicySection) -> ActionHead:
    """Return the head of one leaf; raises ValueError that names path and space of a leaf that has none."""
    match leaf:
        case Discrete():
            kind = EpsilonGreedy if section.discrete == "epsilon_greedy" else Categorical
            return kind(path, leaf)
        case MultiDiscrete():
            return MultiCategorical(path, leaf)
        case MultiBinary():
            return Bernoulli(path, leaf)
        case Box():
            return _box_head(path, leaf, section)


def _box_head(path: str, leaf: Box, section: PolicySection) -> Gaussian:
    if not np.issubdtype(np.dtype(leaf.dtype), np.floating) or math.prod(leaf.shape) == 0:
        raise ValueError(
            f"action_space at {path!r}: {leaf!r} cannot be drawn from; "
            "a Box of actions must hold at least one float, use Discrete or MultiDiscrete for integers"
        )
    if section.continuous == "clipped":
        return Gaussian(path, leaf, section.initial_log_std)
    if not (np.isfinite(leaf.low).all() and np.isfinite(leaf.high).all()):
        raise ValueError(
            f"action_space at {path!r}: {leaf!r} has no finite bounds to squash into; "
            "set policy.continuous=clipped, which PPO can learn with"
        )
    kind = ConditionalSquashedGaussian if section.state_dependent_std else SquashedGaussian
    return kind(path, leaf, section.initial_log_std)
