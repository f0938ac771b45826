"""The policy: observations in, actions and values out; what actors run and the learner trains.

Observations and actions are dictionaries by the paths of `penstock.wire.spaces.leaves`:
"observation", "observation/camera", "action", "action/0". An action is stored and sent as it was
drawn (index from 0, unclipped Gaussian, unsquashed Gaussian); `environment_action` turns it into
what an environment takes. Beside the observation a row may hold action masks (`mask/action`, bool, true where
allowed) and the policy's state (`state/…`, see `penstock.policy.memory`); without them everything is allowed,
and an episode begins. Nothing here waits or touches a file; a policy is used by one thread.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.acting import NumpyForward, numpy_forward
from penstock.policy.custom_network import body_of
from penstock.policy.distributions import ActionHead, Place, Reals, head_of
from penstock.policy.layers import dropouts
from penstock.policy.masking import ActionMasks, masked
from penstock.policy.memory import Look, Memory
from penstock.policy.networks import Body, Inputs, Reader, initialise
from penstock.policy.normaliser import Normaliser
from penstock.policy.trajectory import Trajectory
from penstock.wire.spaces import Dict, Space, leaves, unflatten
from penstock.wire.tensor import Array, all_finite

POLICY_GAIN = 0.01
HIDDEN_GAIN = math.sqrt(2.0)
_NO_STATE: Final[dict[str, Array]] = {}
_NOT_FINITE: Final = "policy: the network's outputs are not finite; check observation and weights"


@dataclass(slots=True)
class Acted:
    """Made in every step, so not frozen, which would take twice as long.

    action: by path, [N, *shape] in the dtype of its leaf, as drawn. log_prob: float32 [N], joint.

    state: after this step, by path, [N, ...]; new arrays.
    """

    action: dict[str, Array]
    log_prob: NDArray[np.float32]
    state: Mapping[str, Array] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """parameters: [N, P], what actions are drawn from.   state: after this step, by path, [N, ...]. As `Acted`."""

    parameters: Reals
    state: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """log_prob, entropy, value: [...], in the policy's dtype, differentiable."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of M rows. parameters: [M, P], of every action head behind one another, masked.   value: [M]."""

    parameters: Tensor
    value: Tensor


class Policy(nn.Module):
    """Actor-critic over fixed-size observations. Make one with `build`."""

    combines_heads = False
    """Whether `outputs` are more than what the two last layers give, each by itself."""
    has_slope = False
    """Whether `slope` is there; whoever overrides `joint_log_prob` or `joint_entropy` says False."""

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.memory = Memory(observation_space, section)
        self.reader = Reader(self.memory.frames.space, section)
        heads = [head_of(path, leaf, section) for path, leaf in leaves(action_space, "action")]
        self.heads = nn.ModuleList(heads)
        # Plain tuples beside the module list: looking a submodule up costs more than using it.
        self.action_heads: tuple[ActionHead, ...] = tuple(heads)
        ends = np.cumsum([head.size for head in heads]).tolist()
        self._cuts = tuple(slice(end - head.size, end) for head, end in zip(heads, ends, strict=True))
        self.actor_body = body_of(self.reader, section)
        self.critic_body = None if section.shared_trunk else body_of(self.reader, section)
        width = self.memory.add_cores(self.actor_body.width)
        self.actor_head = nn.Linear(width, ends[-1])
        self.critic_head = nn.Linear(width, 1)
        self._remembers = bool(self.memory.state_space.spaces)
        self._masks = ActionMasks(action_space, self._cuts)
        self.dropouts = dropouts(self)
        self.has_slope = all(head.has_slope for head in heads)
        self._random = np.random.default_rng(0)
        self._fast: NumpyForward | None = None

    @property
    def normaliser(self) -> Normaliser | None:
        """Statistics of the observations, where the section asks for them."""
        return self.reader.normaliser

    @property
    def state_space(self) -> Dict:
        """Parts by path below `state`; without parts for a policy that remembers nothing."""
        return self.memory.state_space

    def initial_state(self, count: int) -> dict[str, Array]:
        """What an episode begins with, by path, [count, ...]: zeros."""
        return self.memory.initial(count)

    @property
    def dtype(self) -> torch.dtype:
        """float32; float64 after `double()`."""
        return self.actor_head.weight.dtype

    def seed_actions(self, seed: int) -> None:
        """Start the generator that actions are drawn from (it is not part of the weights)."""
        self._random = np.random.default_rng(seed)

    def explore(self, scalars: Mapping[str, float], place: Place) -> None:
        """Draw as the numbers say that came with the weights (`Algorithm.scalars`).

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
        """What actions are drawn from, and what is remembered; no gradients."""
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
        shares: list[Any] = []
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            part = parameters[:, cut]
            if masks is not None and head.path in masks:
                part = head.masked(part, masks[head.path])
            actions[head.path], share = head.mode(part) if deterministic else head.draw(part, random)
            shares.append(share)
        log_prob = shares[0] if len(shares) == 1 else np.sum(shares, 0)
        return Acted(actions, log_prob.astype(np.float32, copy=False))

    def chance(
        self,
        parameters: Reals,
        action: Mapping[str, Array],
        masks: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> NDArray[np.float32]:
        """Joint log-probability float32 [N] with which `choose` draws these actions, as drawn.

        Arguments and error as there.
        """
        if not all_finite(parameters):
            raise FloatingPointError(_NOT_FINITE)
        shares: list[Any] = []
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            part = parameters[:, cut]
            if masks is not None and head.path in masks:
                part = head.masked(part, masks[head.path])
            shares.append(head.chance(part, action[head.path]))
        log_prob: NDArray[np.float32] = np.sum(shares, 0).astype(np.float32, copy=False)
        return log_prob

    def distribution(
        self, parameters: Reals, masks: Mapping[str, NDArray[np.bool_]] | None = None
    ) -> dict[str, Reals]:
        """What actions are drawn from, by the path of the action and what it is.

        "action/probability" [N, n].
        """
        described: dict[str, Reals] = {}
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            part = parameters[:, cut]
            if masks is not None and head.path in masks:
                part = head.masked(part, masks[head.path])
            described |= {f"{head.path}/{name}": array for name, array in head.describe(part).items()}
        return described

    def values(self, observation: Mapping[str, Array]) -> NDArray[np.float32]:
        """The critic's, float32 [N]; no gradients."""
        with torch.inference_mode():
            values: NDArray[np.float32] = self.value(self._tensors(observation)).float().cpu().numpy()
        return values

    def action_parameters(self, observation: Mapping[str, Array]) -> Reals:
        """Outputs of the actor network, [N, P], not masked, with the weights of this moment; no gradients."""
        return self.step(observation).parameters

    def _actor_outputs(self, observation: Mapping[str, Array]) -> Reals:
        """Of what the reader reads: stacks, where frames are stacked."""
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
        """Joint log-probability float32 [N] of stored actions by torch, as in training; no gradients."""
        with torch.inference_mode():
            inputs = self.read(self._tensors(observation))
            answer = self.joint_log_prob(self._acting(inputs), self._tensors(action))
        result: NDArray[np.float32] = answer.float().cpu().numpy()
        return result

    def acting_log_prob(
        self, observation: Mapping[str, Array], action: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        """`log_prob` under the very outputs that `act` draws from, for the probe."""
        parameters = torch.from_numpy(self.action_parameters(observation)).to(self.actor_head.weight.device)
        with torch.inference_mode():
            forbidden = self._masks.forbidden(self._tensors(observation), parameters)
            answer = self.joint_log_prob(masked(parameters, forbidden), self._tensors(action))
        result: NDArray[np.float32] = answer.float().cpu().numpy()
        return result

    def read(self, observation: Mapping[str, Tensor]) -> Inputs:
        """Normalised inputs of raw observations [..., *shape], leading axes flattened to M rows."""
        if self._remembers:
            inputs = self.memory.read(observation, self.reader, self.dtype)
        else:
            inputs = self.reader.read(observation, self.dtype)
        return self._masked_by(inputs, observation)

    def look(self, seen: Trajectory) -> Look:
        """Inputs of everything that a trajectory shows, each row with what was remembered before it."""
        look = self.memory.look(seen, self.reader, self.dtype)
        return replace(look, inputs=self._masked_by(look.inputs, seen.observation))

    def _masked_by(self, inputs: Inputs, observation: Mapping[str, Tensor]) -> Inputs:
        forbidden = self._masks.forbidden(observation, inputs.vector)
        return inputs if forbidden is None else replace(inputs, forbidden=forbidden)

    def bodies(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Features of actor and critic before the recurrent cores, [M, F] each."""
        actor = self.actor_body(inputs)
        return actor, actor if self.critic_body is None else self.critic_body(inputs)

    def _features(self, inputs: Inputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the heads read, and the newest state."""
        return self.memory.recall(*self.bodies(inputs), inputs)

    def outputs(self, inputs: Inputs) -> Outputs:
        """Both networks on the wanted rows."""
        actor, critic, _ = self._features(inputs)
        parameters = masked(self.actor_head(actor), inputs.forbidden)
        return Outputs(parameters, self.critic_head(critic).squeeze(-1))

    def _acting(self, inputs: Inputs) -> Tensor:
        """The actor alone, [M, P]."""
        if inputs.time is not None:
            return self.outputs(inputs).parameters
        return masked(self.actor_head(self.actor_body(inputs)), inputs.forbidden)

    def value_of(self, inputs: Inputs) -> Tensor:
        """The critic alone, [M]."""
        if inputs.time is not None:
            return self.outputs(inputs).value
        body = self.actor_body if self.critic_body is None else self.critic_body
        value: Tensor = self.critic_head(body(inputs))
        return value.squeeze(-1)

    def joint_log_prob(self, parameters: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """Parameters [..., P], stored actions [..., *shape] → [...]: the sum over action heads."""
        pieces = zip(self.action_heads, self._cuts, strict=True)
        shares = [head.log_prob(parameters[..., cut], action[head.path]) for head, cut in pieces]
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)

    def joint_entropy(self, parameters: Tensor) -> Tensor:
        """Parameters [..., P] → [...], in nats."""
        pieces = zip(self.action_heads, self._cuts, strict=True)
        shares = [head.entropy(parameters[..., cut]) for head, cut in pieces]
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)

    def slope(
        self, parameters: Tensor, action: Mapping[str, Tensor], by_log_prob: Tensor, by_entropy: float
    ) -> Tensor:
        """∂L/∂parameters [n, P], as `ActionHead.slope`, by `joint_log_prob` and `joint_entropy`.

        Only where `has_slope`.
        """
        pieces = zip(self.action_heads, self._cuts, strict=True)
        slopes = [
            head.slope(parameters[..., cut], action[head.path], by_log_prob, by_entropy)
            for head, cut in pieces
        ]
        return slopes[0] if len(slopes) == 1 else torch.cat(slopes, -1)

    def evaluate(self, observation: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> Evaluated:
        """Of tensors with any equal leading axes [..., *shape]."""
        lead = self._leading(observation)
        outputs = self.outputs(self.read(observation))
        parameters = outputs.parameters.reshape(*lead, -1)
        log_prob, entropy = self.joint_log_prob(parameters, action), self.joint_entropy(parameters)
        return Evaluated(log_prob, entropy, outputs.value.reshape(lead))

    def value(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The critic alone, [...]."""
        return self.value_of(self.read(observation)).reshape(self._leading(observation))

    def _leading(self, observation: Mapping[str, Tensor]) -> tuple[int, ...]:
        path, leaf = next(leaves(self.observation_space, "observation"))
        shape = tuple(observation[path].shape)
        return shape[: len(shape) - len(leaf.shape)]

    def environment_action(self, action: Mapping[str, Array]) -> Any:
        """Stored actions [N, *shape] as `VectorEnv.step` takes them: offset, clipped or scaled, nested."""
        ready = {head.path: head.to_environment(action[head.path]) for head in self.action_heads}
        return unflatten(self.action_space, ready, "action")


class QPolicy(Policy):
    """Values of actions in place of logits; the value of an observation is that of its best action.

    Dueling (Wang et al. 2016, eq. 9): the critic's V and the actor's A make Q = V + A − mean A. Acting needs
    A alone, since V is the same for all actions; so `action_parameters` are A, and the forward pass stays a
    chain of layers.
    """

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__(observation_space, action_space, section)
        self.combines_heads = section.dueling

    def outputs(self, inputs: Inputs) -> Outputs:
        """parameters: Q of every action, masked.   value: the largest."""
        actor, critic, _ = self._features(inputs)
        values: Tensor = self.actor_head(actor)
        if self.combines_heads:
            values = self.critic_head(critic) + values - values.mean(-1, keepdim=True)
        values = masked(values, inputs.forbidden)
        return Outputs(values, values.amax(-1))

    def value_of(self, inputs: Inputs) -> Tensor:
        """Of the best action, [M]."""
        return self.outputs(inputs).value


def build(observation_space: Space, action_space: Space, section: PolicySection, seed: int) -> Policy:
    """A policy with freshly initialised weights; equal arguments give equal weights.

    Orthogonal weights with gain √2 in hidden layers, 0.01 before the actions, 1 before the value
    (Andrychowicz et al. 2021), zero biases; a custom network initialises itself. Raises ValueError that names
    field and space when a space cannot be handled, and what can, and ConfigurationError for a custom network
    that breaks its contract and for `kwargs`, of which there are none here.
    """
    if section.kwargs:
        raise ConfigurationError(
            f"policy.kwargs={section.kwargs}: this workload's policy takes none; leave it out"
        )
    kind = QPolicy if section.discrete == "epsilon_greedy" else Policy
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        policy = kind(observation_space, action_space, section)
    generator = torch.Generator().manual_seed(seed)
    for body in (policy.actor_body, policy.critic_body):
        if isinstance(body, Body):
            initialise(body, HIDDEN_GAIN, generator)
    for core in (policy.memory.actor_core, policy.memory.critic_core):
        if core is not None:
            core.initialise(generator)
    initialise(policy.actor_head, POLICY_GAIN, generator)
    initialise(policy.critic_head, 1.0, generator)
    policy.seed_actions(seed)
    # For good: whatever differs in training mode would fake a ratio between actor and learner.
    return policy.eval()
