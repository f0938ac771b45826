"""Actor and critic as networks: the part of a policy that the learner trains, in torch.

Observations and actions are dictionaries by the paths of `penstock.protocol.spaces.leaves`, raw and as they
were drawn. Beside the observation a row may hold action masks (`mask/action`, bool, true where allowed) and
the policy's state (`state/…`, see `penstock.policy.memory`); without them everything is allowed, and an
episode begins. `penstock.policy.policy` adds the actor's part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.settings import PolicySection
from penstock.policy.custom_network import body_of
from penstock.policy.distributions import ActionHead, ClosedForm, head_of, joint
from penstock.policy.layers import dropouts
from penstock.policy.masking import ActionMasks, masked
from penstock.policy.memory import Memory, SeenTrajectory
from penstock.policy.networks import Inputs, Reader
from penstock.policy.normaliser import Normaliser
from penstock.policy.numbers import Numbers
from penstock.policy.trajectory import Trajectory
from penstock.protocol.spaces import Dict, Space, leaves


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Results of `evaluate`.

    log_prob, entropy, value: [...], in the policy's dtype, differentiable.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of both networks for M rows.

    parameters: [M, P], of every action head behind one another, masked.
    value: [M].
    """

    parameters: Tensor
    value: Tensor


class ActorCritic(nn.Module):
    """An actor and a critic over fixed-size observations, and the heads that the actor's outputs are for."""

    combines_heads = False
    """True where `outputs` are more than what the two last layers give, each by itself."""
    has_slope = False
    """True where `closed_form` is implemented.

    A class that overrides `joint_log_prob` or `joint_entropy` sets False.
    """

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

    @property
    def normaliser(self) -> Normaliser | None:
        """Return the statistics of the observations, where the section asks for them."""
        return self.reader.normaliser

    @property
    def state_space(self) -> Dict:
        """Return the parts of the state by path below `state`; none for a policy without state."""
        return self.memory.state_space

    @property
    def dtype(self) -> torch.dtype:
        """Return float32, or float64 after `double()`."""
        return self.actor_head.weight.dtype

    def read(self, observation: Mapping[str, Tensor]) -> Inputs:
        """Return normalised inputs of raw observations [..., *shape], leading axes flattened to M rows."""
        if self._remembers:
            inputs = self.memory.read(observation, self.reader, self.dtype)
        else:
            inputs = self.reader.read(observation, self.dtype)
        return self._masked_by(inputs, observation)

    def look(self, seen: Trajectory) -> SeenTrajectory:
        """Return inputs of all rows and last observations of a trajectory.

        Each row has the state before it.
        """
        look = self.memory.look(seen, self.reader, self.dtype)
        return replace(look, inputs=self._masked_by(look.inputs, seen.observation))

    def _masked_by(self, inputs: Inputs, observation: Mapping[str, Tensor]) -> Inputs:
        forbidden = self._masks.forbidden(observation, inputs.vector)
        return inputs if forbidden is None else replace(inputs, forbidden=forbidden)

    def bodies(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return features of actor and critic before the recurrent cores, [M, F] each."""
        actor = self.actor_body(inputs)
        return actor, actor if self.critic_body is None else self.critic_body(inputs)

    def _features(self, inputs: Inputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the features that the heads read, and the newest state."""
        return self.memory.recall(*self.bodies(inputs), inputs)

    def outputs(self, inputs: Inputs) -> Outputs:
        """Run both networks on the wanted rows."""
        actor, critic, _ = self._features(inputs)
        parameters = masked(self.actor_head(actor), inputs.forbidden)
        return Outputs(parameters, self.critic_head(critic).squeeze(-1))

    def _acting(self, inputs: Inputs) -> Tensor:
        """Run the actor alone; returns [M, P]."""
        if inputs.time is not None:
            return self.outputs(inputs).parameters
        return masked(self.actor_head(self.actor_body(inputs)), inputs.forbidden)

    def value_of(self, inputs: Inputs) -> Tensor:
        """Run the critic alone; returns [M]."""
        if inputs.time is not None:
            return self.outputs(inputs).value
        body = self.actor_body if self.critic_body is None else self.critic_body
        value: Tensor = self.critic_head(body(inputs))
        return value.squeeze(-1)

    def joint_log_prob(self, parameters: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """Return log-probabilities [...], summed over action heads.

        parameters: [..., P]. action: stored actions by path, [..., *shape].
        """
        pieces = zip(self.action_heads, self._cuts, strict=True)
        parts = [head.log_prob(parameters[..., cut], action[head.path]) for head, cut in pieces]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def joint_entropy(self, parameters: Tensor) -> Tensor:
        """Return entropies [...] in nats of parameters [..., P], summed over action heads."""
        pieces = zip(self.action_heads, self._cuts, strict=True)
        parts = [head.entropy(parameters[..., cut]) for head, cut in pieces]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def closed_form(self, parameters: Numbers, action: Mapping[str, Numbers]) -> ClosedForm:
        """Return `joint_log_prob` with the slopes of it and of `joint_entropy`; only where `has_slope`.

        Arguments are those of `ActionHead.closed_form`, with parameters [n, P] and actions by path.
        """
        pieces = zip(self.action_heads, self._cuts, strict=True)
        return joint([head.closed_form(parameters[:, cut], action[head.path]) for head, cut in pieces])

    def evaluate(self, observation: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> Evaluated:
        """Return log-probability, entropy and value of tensors with any equal leading axes [..., *shape]."""
        lead = self._leading(observation)
        outputs = self.outputs(self.read(observation))
        parameters = outputs.parameters.reshape(*lead, -1)
        log_prob, entropy = self.joint_log_prob(parameters, action), self.joint_entropy(parameters)
        return Evaluated(log_prob, entropy, outputs.value.reshape(lead))

    def value(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Return the critic's values [...] of observations [..., *shape]."""
        return self.value_of(self.read(observation)).reshape(self._leading(observation))

    def _leading(self, observation: Mapping[str, Tensor]) -> tuple[int, ...]:
        path, leaf = next(leaves(self.observation_space, "observation"))
        shape = tuple(observation[path].shape)
        return shape[: len(shape) - len(leaf.shape)]
