"""The networks of actor and critic, which the learner trains, in torch.

Rows are as in `penstock.policy.acting.acting_policy`; `penstock.policy.policy` adds the actor's part.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.distributions import ActionHead, head_of
from penstock.policy.networks import ActionMasks, Body, Inputs, Normaliser, Reader, dropouts, masked
from penstock.policy.recurrent import HELD, Core, FrameStack, Trajectory, single, single_step, unroll
from penstock.policy.weights import decode, encode
from penstock.protocol.spaces import Dict, Space, leaves, sample, zeros
from penstock.protocol.tensor import Array

# ---- Networks of users: `policy.network = "module:Class"` in the place of trunks and MLP.

_ROWS = 5
_TOLERANCE = 1e-3
"""Kernels for one row and for many round differently; a dependence on other rows exceeds this."""


class Network(Protocol):
    """The contract of the class, which must also be a `torch.nn.Module`.

    It is constructed as `Class(reader, **policy.network_arguments)`, after torch's generator was seeded,
    and initialises itself. A policy has one for the actor and one for the critic, or one for both
    (`policy.shared_trunk`). `reader` describes the inputs: `reader.width` columns of vector,
    `reader.columns[path]` those of a part, `reader.images` path and space of each image.

    In `forward` the features of a row must not depend on other rows, earlier calls or training mode, and
    inputs must not be modified: actor, π_prox and every gradient step need the same features of an
    observation. `penstock.policy.networks` has dropout and batch normalisation that satisfy this. All
    parameters are float32 and trained; buffers are published and stored with them.
    """

    width: int
    """F, the number of returned features."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return features [M, F] of `Inputs` of M rows, in the dtype of `inputs.vector`, with gradients."""
        ...


class CustomBody(nn.Module):
    """Wraps a user's network as a body."""

    chain = None

    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        self.network = network
        self.width = width

    def forward(self, inputs: Inputs) -> Tensor:
        features: Tensor = self.network(inputs)
        return features


def body_of(reader: Reader, section: PolicySection) -> Body | CustomBody:
    """Return the network between inputs and heads; ConfigurationError for one that breaks its contract."""
    if not section.network:
        return Body(reader, section)
    name = f"policy.network={section.network!r}"
    network = _construct(name, reader, section)
    width = _width(name, network)
    _check_weights(name, network)
    # A copy, because the check may change a network that depends on training mode.
    _check_features(name, copy.deepcopy(network), width, reader)
    return CustomBody(network, width)


def load(name: str) -> type[nn.Module]:
    """Return the class of `module:Class`; raises ConfigurationError with the cause."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"policy.network={name!r}: write module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigurationError(
            f"policy.network={name!r}: cannot be loaded: {_described(error)}; is its folder on PYTHONPATH?"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigurationError(f"policy.network={name!r}: {found!r}, must be a class of torch.nn.Module")
    return found


def _construct(name: str, reader: Reader, section: PolicySection) -> nn.Module:
    make, arguments = load(section.network), section.network_arguments
    try:
        return make(reader, **arguments)
    except Exception as error:
        raise ConfigurationError(
            f"{name}: made with policy.network_arguments={arguments!r} it raised {_described(error)}"
        ) from error


def _width(name: str, network: nn.Module) -> int:
    width = getattr(network, "width", None)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ConfigurationError(f"{name}: width={width!r}; say how many features it gives as `self.width`")
    return width


def _check_weights(name: str, network: nn.Module) -> None:
    parameters = dict(network.named_parameters())
    other = [f"{key} {tensor.dtype}" for key, tensor in parameters.items() if tensor.dtype != torch.float32]
    if other:
        raise ConfigurationError(f"{name}: parameters {other[:4]}, must be torch.float32")
    frozen = [key for key, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ConfigurationError(f"{name}: parameters {frozen[:4]} take no gradient; make them buffers")
    try:
        decode(encode(network))
    except Exception as error:
        raise ConfigurationError(f"{name}: its weights cannot be published: {_described(error)}") from error


def _check_features(name: str, network: nn.Module, width: int, reader: Reader) -> None:
    """Raise ConfigurationError unless features depend on their own row alone, in every mode.

    One row and several, in evaluation and in training mode, must give the same, and leave inputs unchanged.
    """
    inputs = _sample_inputs(reader)
    given = Inputs(inputs.vector.clone(), tuple(image.clone() for image in inputs.images))
    features = _features(name, network.eval(), inputs, width)
    if not torch.isfinite(features).all():
        raise ConfigurationError(f"{name}: features of a finite observation hold NaN or infinity")
    if not _alike(given.vector, inputs.vector) or not all(map(_alike, given.images, inputs.images)):
        raise ConfigurationError(f"{name}: forward writes to its inputs; copy them first")
    if not _alike(_features(name, network, inputs, width), features):
        raise ConfigurationError(
            f"{name}: a second call gives other features; forward must depend on its inputs alone"
        )
    if not _alike(_features(name, network, inputs.narrow(0, 1), width), features[:1]):
        raise ConfigurationError(
            f"{name}: features of a row depend on other rows; compute each row on its own"
        )
    if not _alike(_features(name, network.train(), inputs, width), features):
        raise ConfigurationError(
            f"{name}: training mode gives other features; use Dropout and BatchNorm of "
            "penstock.policy.networks, which every forward pass of actor and learner has in common"
        )


def _features(name: str, network: nn.Module, inputs: Inputs, width: int) -> Tensor:
    rows = len(inputs.vector)
    try:
        features = network(inputs)
    except Exception as error:
        raise ConfigurationError(f"{name}: forward raised {_described(error)} for {rows} rows") from error
    if not isinstance(features, Tensor):
        raise ConfigurationError(f"{name}: forward gives a {type(features).__name__}, must be a Tensor")
    if features.shape != (rows, width) or features.dtype != inputs.vector.dtype:
        raise ConfigurationError(
            f"{name}: forward gives {features.dtype}{tuple(features.shape)} for {rows} rows, must be "
            f"{inputs.vector.dtype}{(rows, width)}, as its width says"
        )
    return features.detach()


def _sample_inputs(reader: Reader) -> Inputs:
    random = np.random.default_rng(0)
    drawn = {path: sample(leaf, _ROWS, random) for path, leaf in leaves(reader.space, "observation")}
    return reader.read({path: torch.from_numpy(array) for path, array in drawn.items()}, torch.float32)


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# ---- The state of a policy within an episode.
#
#     frames of before ─► stack ─► reader ─► body ─► recurrent core ─► head
#     └──── state/frames/… ───┘                     └ state/actor/h … ┘
#
# State is a dictionary by path, `state/…`, one row per slot; an episode begins with zeros. A policy without
# state has an empty dictionary.


@dataclass(frozen=True, slots=True)
class SeenTrajectory:
    """Inputs of a trajectory. M = T · B rows, step by step.

    observation: stacked, by path, [T, B, ...].
    inputs: of the rows; with a recurrent core, also of the K last observations, appended.
    lasts: inputs of the K last observations where `inputs` do not have them; None: there are none.
    starts: bool [T, B] with a recurrent core, see `Trajectory.starts`.
    """

    observation: Mapping[str, Tensor]
    inputs: Inputs
    lasts: Inputs | None
    starts: NDArray[np.bool_] | None = None


class Memory(nn.Module):
    """The parts of a policy with state."""

    actor_core: Core | None
    critic_core: Core | None

    def __init__(self, space: Space, section: PolicySection) -> None:
        super().__init__()
        self.frames = FrameStack(space, section.frame_stack)
        self._leaves = list(leaves(space, "observation"))
        self._section = section
        self.actor_core = self.critic_core = None
        self.burn_in = section.burn_in
        self.state_space = Dict(self.frames.state)
        self._state = list(leaves(self.state_space, "state"))

    def add_cores(self, width: int) -> int:
        kind, size = self._section.recurrent, self._section.recurrent_size
        if kind == "none":
            return width
        self.actor_core = Core("actor", kind, width, size)
        state = (*self.frames.state, *self.actor_core.state)
        if not self._section.shared_trunk:
            self.critic_core = Core("critic", kind, width, size)
            state = (*state, *self.critic_core.state)
        self.state_space = Dict(state)
        self._state = list(leaves(self.state_space, "state"))
        return size

    @property
    def is_recurrent(self) -> bool:
        """Whether a row's outputs depend on earlier rows beyond its stack of frames."""
        return self.actor_core is not None

    def initial(self, count: int) -> dict[str, Array]:
        return {path: zeros(leaf, (count,)) for path, leaf in self._state}

    def recall(
        self, actor: Tensor, critic: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run the cores over features [M, F] of both trunks; returns the wanted rows and the new state."""
        if self.actor_core is None or inputs.time is None:
            return actor, critic, {}
        actor, state = self.actor_core(actor, inputs.time)
        critic, more = (actor, {}) if self.critic_core is None else self.critic_core(critic, inputs.time)
        if inputs.wanted is not None:
            actor, critic = (rows.index_select(0, inputs.wanted) for rows in (actor, critic))
        return actor, critic, state | more

    def read(self, row: Mapping[str, Tensor], reader: Reader, dtype: torch.dtype) -> Inputs:
        """Return inputs of single steps [..., *shape]."""
        rows = {path: row[path].reshape(-1, *leaf.shape) for path, leaf in self._leaves}
        some = next(iter(rows.values()))
        state = {path: self._given(path, row, some) for path, _ in self._state}
        if self.frames.depth > 1:
            stacked, _ = self.frames.unroll(single_step(rows, state, state[HELD]))
            inputs = reader.read(stacked, dtype)
        else:
            inputs = reader.read(rows, dtype)
        return replace(inputs, time=single(self._of_cores(state))) if self.is_recurrent else inputs

    def look(self, seen: Trajectory, reader: Reader, dtype: torch.dtype) -> SeenTrajectory:
        observation, final = seen.observation, seen.final_observation
        if self.frames.depth > 1:
            observation, final = self.frames.unroll(seen)
        inputs = reader.read(observation, dtype)
        lasts = reader.read(final, dtype) if len(seen.final_slot) else None
        if not self.is_recurrent:
            return SeenTrajectory(observation, inputs, lasts)
        starts = seen.starts()
        time = unroll(
            starts,
            self._of_cores(seen.state),
            burn_in=self.burn_in,
            final_step=seen.final_step.cpu().numpy(),
            final_slot=seen.final_slot.cpu().numpy(),
        )
        joined = inputs if lasts is None else _joined(inputs, lasts)
        return SeenTrajectory(observation, replace(joined, time=time), None, starts)

    def _given(self, path: str, row: Mapping[str, Tensor], like: Tensor) -> Tensor:
        if path in row:
            return row[path]
        leaf = next(leaf for own, leaf in self._state if own == path)
        return torch.from_numpy(zeros(leaf, (len(like),))).to(like.device)

    def _of_cores(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {path: state[path] for path, _ in self._state if not path.startswith("state/frames/")}


def _joined(first: Inputs, second: Inputs) -> Inputs:
    images = zip(first.images, second.images, strict=True)
    return Inputs(torch.cat([first.vector, second.vector]), tuple(torch.cat(pair) for pair in images))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """log_prob, entropy, value: [...], in the policy's dtype, differentiable."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of M rows. parameters: [M, P], of all action heads, concatenated and masked. value: [M]."""

    parameters: Tensor
    value: Tensor


class ActorCritic(nn.Module):
    """An actor and a critic over fixed-size observations, and the action heads of the actor."""

    combines_heads = False
    """Whether `outputs` combine the outputs of the two last layers."""

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.memory = Memory(observation_space, section)
        self.reader = Reader(self.memory.frames.space, section)
        heads = [head_of(path, leaf, section) for path, leaf in leaves(action_space, "action")]
        self.heads = nn.ModuleList(heads)
        # Also as a tuple: the lookup of a submodule is slower than its use.
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

    @property
    def normaliser(self) -> Normaliser | None:
        return self.reader.normaliser

    @property
    def state_space(self) -> Dict:
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
        """Return inputs of all rows and last observations of a trajectory, with the state before each."""
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
        return self.memory.recall(*self.bodies(inputs), inputs)

    def outputs(self, inputs: Inputs) -> Outputs:
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

    def pieces(self, parameters: Tensor) -> Iterator[tuple[ActionHead, Tensor]]:
        """Yield each action head with its part of parameters [..., P]."""
        for head, cut in zip(self.action_heads, self._cuts, strict=True):
            yield head, parameters[..., cut]

    def joint_log_prob(self, parameters: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """Return log-probabilities [...] of stored actions [..., *shape] by path; parameters: [..., P]."""
        parts = [head.log_prob(part, action[head.path]) for head, part in self.pieces(parameters)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def joint_entropy(self, parameters: Tensor) -> Tensor:
        """Return entropies [...] in nats of parameters [..., P], summed over action heads."""
        parts = [head.entropy(part) for head, part in self.pieces(parameters)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def evaluate(self, observation: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> Evaluated:
        """Return log-probability, entropy and value of tensors with any equal leading axes [..., *shape]."""
        lead, outputs = self._leading(observation), self.outputs(self.read(observation))
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
