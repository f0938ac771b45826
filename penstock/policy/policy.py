"""The policy: observations in, actions and values out; what actors run, in numpy where that is faster.

Observations and actions are dictionaries by the paths of `penstock.wire.spaces.leaves`:
"observation", "observation/camera", "action", "action/0". An action is stored and sent as it was
drawn (index from 0, unclipped Gaussian, unsquashed Gaussian); `environment_action` turns it into
what an environment takes. Beside the observation a row may hold action masks (`mask/action`, bool, true where
allowed) and the policy's state (`state/…`, see `penstock.policy.memory`); without them everything is allowed,
and an episode begins. Nothing here waits or touches a file; a policy is used by one thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.settings import PolicySection
from penstock.policy.acting import NumpyForward, numpy_forward
from penstock.policy.actor_critic import ActorCritic
from penstock.policy.distributions import Place, Reals
from penstock.policy.masking import masked
from penstock.wire.spaces import Space, unflatten
from penstock.wire.tensor import Array, all_finite

_NO_STATE: Final[dict[str, Array]] = {}
_NOT_FINITE: Final = "policy: the network's outputs are not finite; check observation and weights"


@dataclass(frozen=True, slots=True)
class Acted:
    """The actions of one forward pass.

    action: by path, [N, *shape] in the dtype of its leaf, as drawn. log_prob: float32 [N], joint.

    state: after this step, by path, [N, ...]; new arrays.
    """

    action: dict[str, Array]
    log_prob: NDArray[np.float32]
    state: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """parameters: [N, P], what actions are drawn from.   state: after this step, by path, [N, ...]."""

    parameters: Reals
    state: Mapping[str, Array]


class Policy(ActorCritic):
    """An actor and critic that acts: it draws actions and returns their probabilities.

    Make one with `penstock.policy.build`.
    """

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__(observation_space, action_space, section)
        self._random = np.random.default_rng(0)
        self._fast: NumpyForward | None = None

    def initial_state(self, count: int) -> dict[str, Array]:
        """Return the state in which an episode begins, by path, [count, ...]: zeros."""
        return self.memory.initial(count)

    def seed_actions(self, seed: int) -> None:
        """Start the generator that actions are drawn from (it is not part of the weights)."""
        self._random = np.random.default_rng(seed)

    def explore(self, scalars: Mapping[str, float], place: Place) -> None:
        """Set how actions are explored by the scalars that came with the weights (`Algorithm.scalars`).

        place: of this policy's rows.
        """
        for head in self.action_heads:
            head.explore(scalars, place)

    def act(self, observation: Mapping[str, Array], *, deterministic: bool = False) -> Acted:
        """Draw one action per row; the mode where `deterministic`.

        observation: by path, [N, *shape], raw, in the dtype of the leaf. N may change between calls.
        The arrays returned are the caller's. Uses the weights of this moment, no gradients.
        """
        step = self.step(observation)
        masks = self._masks.given(observation)
        acted = self.choose(step.parameters, self._random, deterministic=deterministic, masks=masks)
        return replace(acted, state=step.state) if step.state else acted

    def step(self, row: Mapping[str, Array]) -> Step:
        """Return the parameters from which actions are drawn, and the state after the step; no gradients.

        row: observation, masks and state by path, [N, ...].
        """
        if not self._remembers:
            return Step(self._actor_outputs(row), _NO_STATE)
        seen, state = self.memory.frames.push(row) if self.memory.frames.depth > 1 else (row, _NO_STATE)
        if not self.memory.is_recurrent:
            return Step(self._actor_outputs(seen), state)
        with torch.inference_mode():
            inputs = self.read(self._tensors(row))
            actor, _, after = self._features(inputs)
            parameters: Reals = self.actor_head(actor).cpu().numpy()
        return Step(parameters, {**state, **{path: one.float().cpu().numpy() for path, one in after.items()}})

    def choose(
        self,
        parameters: Reals,
        random: np.random.Generator,
        *,
        deterministic: bool = False,
        masks: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> Acted:
        """Draw one action per row of `parameters` [N, P]; the mode where `deterministic`.

        masks: bool [N, size] by path, true where allowed, for leaves that choose one of n.
        Raises FloatingPointError for parameters that are not finite.
        """
        if not all_finite(parameters):
            raise FloatingPointError(_NOT_FINITE)
        actions: dict[str, Array] = {}
        log_probs: list[Any] = []
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            part = parameters[:, cut]
            if masks is not None and head.path in masks:
                part = head.masked(part, masks[head.path])
            actions[head.path], head_log_prob = head.mode(part) if deterministic else head.draw(part, random)
            log_probs.append(head_log_prob)
        log_prob = log_probs[0] if len(log_probs) == 1 else np.sum(log_probs, 0)
        return Acted(actions, log_prob.astype(np.float32, copy=False))

    def chance(
        self,
        parameters: Reals,
        action: Mapping[str, Array],
        masks: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> NDArray[np.float32]:
        """Return the joint log-probability float32 [N] with which `choose` draws these actions, as drawn.

        Arguments and error are those of `choose`.
        """
        if not all_finite(parameters):
            raise FloatingPointError(_NOT_FINITE)
        log_probs: list[Any] = []
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            part = parameters[:, cut]
            if masks is not None and head.path in masks:
                part = head.masked(part, masks[head.path])
            log_probs.append(head.chance(part, action[head.path]))
        log_prob: NDArray[np.float32] = np.sum(log_probs, 0).astype(np.float32, copy=False)
        return log_prob

    def distribution(
        self, parameters: Reals, masks: Mapping[str, NDArray[np.bool_]] | None = None
    ) -> dict[str, Reals]:
        """Return the distribution from which actions are drawn, by the path of the action and its figure.

        An example is "action/probability" [N, n].
        """
        described: dict[str, Reals] = {}
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            part = parameters[:, cut]
            if masks is not None and head.path in masks:
                part = head.masked(part, masks[head.path])
            described |= {f"{head.path}/{name}": array for name, array in head.describe(part).items()}
        return described

    def values(self, observation: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the critic's values, float32 [N]; no gradients."""
        with torch.inference_mode():
            values: NDArray[np.float32] = self.value(self._tensors(observation)).float().cpu().numpy()
        return values

    def action_parameters(self, observation: Mapping[str, Array]) -> Reals:
        """Return outputs of the actor network, [N, P], not masked, with the current weights; no gradients."""
        return self.step(observation).parameters

    def _actor_outputs(self, observation: Mapping[str, Array]) -> Reals:
        """Return the actor's outputs for the inputs of the reader: stacks, where frames are stacked."""
        if self._fast is None or not self._fast.is_current():
            self._fast = numpy_forward(self.reader, self.actor_body.chain, self.actor_head)
        if self._fast is not None:
            return self._fast(observation)
        with torch.inference_mode():
            inputs = self.reader.read(self._tensors(observation), self.dtype)
            parameters: Reals = self.actor_head(self.actor_body(inputs)).cpu().numpy()
        return parameters

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        device = self.actor_head.weight.device
        # Copied: the arrays may be read-only views of a message.
        return {path: torch.from_numpy(np.array(array)).to(device) for path, array in arrays.items()}

    def log_prob(self, observation: Mapping[str, Array], action: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the joint log-probability float32 [N] of stored actions; no gradients.

        It is computed by torch, as in training.
        """
        with torch.inference_mode():
            inputs = self.read(self._tensors(observation))
            answer = self.joint_log_prob(self._acting(inputs), self._tensors(action))
        result: NDArray[np.float32] = answer.float().cpu().numpy()
        return result

    def acting_log_prob(
        self, observation: Mapping[str, Array], action: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        """Return `log_prob` under the very outputs that `act` draws from, for the probe."""
        parameters = torch.from_numpy(self.action_parameters(observation)).to(self.actor_head.weight.device)
        with torch.inference_mode():
            forbidden = self._masks.forbidden(self._tensors(observation), parameters)
            answer = self.joint_log_prob(masked(parameters, forbidden), self._tensors(action))
        result: NDArray[np.float32] = answer.float().cpu().numpy()
        return result

    def environment_action(self, action: Mapping[str, Array]) -> Any:
        """Convert stored actions [N, *shape] to those of `VectorEnv.step`.

        Offset, clipped or scaled, nested.
        """
        ready = {head.path: head.to_environment(action[head.path]) for head in self.action_heads}
        return unflatten(self.action_space, ready, "action")
