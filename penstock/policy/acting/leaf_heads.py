"""Which kind of distribution a leaf of the action space has."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from penstock.config.settings import PolicySection
from penstock.policy.acting.choice_drawing import (
    BernoulliDrawing,
    CategoricalDrawing,
    MultiCategoricalDrawing,
)
from penstock.policy.acting.drawing import Drawing
from penstock.policy.acting.gaussian_drawing import (
    ConditionalSquashedGaussianDrawing,
    GaussianDrawing,
    SquashedGaussianDrawing,
)
from penstock.policy.acting.greedy_drawing import EpsilonGreedyDrawing
from penstock.policy.acting.input_layout import check_codes
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete

H = TypeVar("H", bound=Drawing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds(Generic[H]):
    """What makes a head of each kind. A Box takes the initial logarithm of its deviations as well."""

    categorical: Callable[[str, Discrete], H]
    epsilon_greedy: Callable[[str, Discrete], H]
    multi_categorical: Callable[[str, MultiDiscrete], H]
    bernoulli: Callable[[str, MultiBinary], H]
    gaussian: Callable[[str, Box, float], H]
    squashed: Callable[[str, Box, float], H]
    conditional: Callable[[str, Box, float], H]

    def of_leaf(self, path: str, leaf: Leaf, section: PolicySection) -> H:
        """Return the head of one leaf; raises ValueError that names path and space of one that has none."""
        check_codes(f"action_space at {path!r}", leaf)
        match leaf:
            case Discrete():
                is_greedy = section.discrete == "epsilon_greedy"
                return (self.epsilon_greedy if is_greedy else self.categorical)(path, leaf)
            case MultiDiscrete():
                return self.multi_categorical(path, leaf)
            case MultiBinary():
                return self.bernoulli(path, leaf)
            case Box():
                return self._of_box(path, leaf, section)

    def _of_box(self, path: str, leaf: Box, section: PolicySection) -> H:
        if not np.issubdtype(np.dtype(leaf.dtype), np.floating) or math.prod(leaf.shape) == 0:
            raise ValueError(
                f"action_space at {path!r}: {leaf!r} cannot be drawn from; "
                "a Box of actions must hold at least one float, use Discrete or MultiDiscrete for integers"
            )
        if section.continuous == "clipped":
            return self.gaussian(path, leaf, section.initial_log_std)
        if not (np.isfinite(leaf.low).all() and np.isfinite(leaf.high).all()):
            raise ValueError(
                f"action_space at {path!r}: {leaf!r} has no finite bounds to squash into; "
                "set policy.continuous=clipped, which PPO can learn with"
            )
        kind = self.conditional if section.state_dependent_std else self.squashed
        return kind(path, leaf, section.initial_log_std)


DRAWINGS: Final[Kinds[Drawing]] = Kinds(
    categorical=CategoricalDrawing,
    epsilon_greedy=EpsilonGreedyDrawing,
    multi_categorical=MultiCategoricalDrawing,
    bernoulli=BernoulliDrawing,
    gaussian=GaussianDrawing,
    squashed=SquashedGaussianDrawing,
    conditional=ConditionalSquashedGaussianDrawing,
)
