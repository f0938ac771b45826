"""The policy: observations in, actions and values out; what actors run and the learner trains.

Observations and actions are dictionaries by the paths of `penstock.wire.spaces.leaves`:
"observation", "observation/camera", "action", "action/0". An action is stored and sent as it was
drawn (index from 0, unclipped Gaussian, unsquashed Gaussian); `environment_action` turns it into
what an environment takes. Nothing here waits or touches a file; a policy is used by one thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.runtime.settings import PolicySection
from penstock.wire.spaces import Space
from penstock.wire.tensor import Array


@dataclass(frozen=True, slots=True)
class Acted:
    """action: by path, [N, *shape] in the dtype of its leaf, as drawn. log_prob: float32 [N], joint."""

    action: dict[str, Array]
    log_prob: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """log_prob, entropy, value: [...], in the policy's dtype, differentiable."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class Policy(nn.Module):
    """Actor-critic over fixed-size observations. Make one with `build`."""

    observation_space: Space
    action_space: Space

    def seed_actions(self, seed: int) -> None:
        """Start the generator that actions are drawn from (it is not part of the weights)."""
        raise NotImplementedError

    def act(self, observation: Mapping[str, Array], *, deterministic: bool = False) -> Acted:
        """Draw one action per row; the mode where `deterministic`.

        observation: by path, [N, *shape], raw, in the dtype of the leaf. N may change between calls.
        The arrays returned are the caller's. Uses the weights of this moment, no gradients.
        """
        raise NotImplementedError

    def log_prob(self, observation: Mapping[str, Array], action: Mapping[str, Array]) -> NDArray[np.float32]:
        """Joint log-probability float32 [N] of stored actions, for the probe; no gradients."""
        raise NotImplementedError

    def evaluate(self, observation: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> Evaluated:
        """Of tensors with any equal leading axes [..., *shape]."""
        raise NotImplementedError

    def value(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The critic alone, [...]."""
        raise NotImplementedError

    def environment_action(self, action: Mapping[str, Array]) -> Any:  # noqa: ANN401 - any Gymnasium action
        """Stored actions [N, *shape] as `VectorEnv.step` takes them: offset, clipped or scaled, nested."""
        raise NotImplementedError


def build(observation_space: Space, action_space: Space, section: PolicySection, seed: int) -> Policy:
    """A policy with freshly initialised weights; equal arguments give equal weights.

    Raises ValueError that names field and space when a space cannot be handled, and what can.
    """
    raise NotImplementedError
