"""Action distributions: how the network's outputs become actions, log-probabilities and entropies.

Each leaf of the action space has a head of its own.
"""

from typing import Final

from penstock.config.settings import PolicySection
from penstock.policy.acting.leaf_heads import Kinds
from penstock.policy.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from penstock.policy.distributions.epsilon_greedy import EpsilonGreedy
from penstock.policy.distributions.gaussian import ConditionalSquashedGaussian, Gaussian, SquashedGaussian
from penstock.policy.distributions.head import ActionHead, ClosedForm, joint
from penstock.protocol.spaces import Leaf

__all__ = [
    "ActionHead",
    "Bernoulli",
    "Categorical",
    "ClosedForm",
    "ConditionalSquashedGaussian",
    "EpsilonGreedy",
    "Gaussian",
    "MultiCategorical",
    "SquashedGaussian",
    "head_of",
    "joint",
]

_HEADS: Final[Kinds[ActionHead]] = Kinds(
    categorical=Categorical,
    epsilon_greedy=EpsilonGreedy,
    multi_categorical=MultiCategorical,
    bernoulli=Bernoulli,
    gaussian=Gaussian,
    squashed=SquashedGaussian,
    conditional=ConditionalSquashedGaussian,
)


def head_of(path: str, leaf: Leaf, section: PolicySection) -> ActionHead:
    """Return the head of one leaf; raises ValueError that names path and space of a leaf that has none."""
    return _HEADS.of_leaf(path, leaf, section)
