"""The policy in torch: observations in, actions and values out; acts in numpy where that is faster."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.acting.acting_policy import ActingPolicy, Step
from penstock.policy.acting.array_policy import ACTIVATIONS, Activation, Linear, NumpyForward, NumpyNormaliser
from penstock.policy.acting.drawing import Reals
from penstock.policy.actor_critic import ActorCritic, Outputs
from penstock.policy.networks import ACTIVATIONS as MODULES
from penstock.policy.networks import Body, Dropout, Inputs, Reader, initialise, masked
from penstock.policy.weights import load_into
from penstock.protocol.spaces import Space
from penstock.protocol.tensor import Array

# ---- The forward pass in numpy over the parameters of a torch module.

_BY_MODULE: dict[type[nn.Module], Activation] = {MODULES[name]: ACTIVATIONS[name] for name in MODULES}


class ModuleForward(NumpyForward):
    """Runs a chain of linear layers and activations of a module."""

    def __init__(self, reader: Reader, layers: Sequence[nn.Module]) -> None:
        self._tensors: list[Tensor] = []
        normaliser = None
        if reader.normaliser is not None:
            mean, variance = reader.normaliser.mean, reader.normaliser.variance
            normaliser = NumpyNormaliser(mean.numpy(), variance.numpy(), reader.normaliser.clip)
            self._tensors += [mean, variance]
        super().__init__(reader, normaliser, [self._taken(layer) for layer in layers])
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def is_current(self) -> bool:
        """Return whether all parameters still have the addresses of the constructor's arrays."""
        return [tensor.data_ptr() for tensor in self._tensors] == self._addresses

    def _taken(self, layer: nn.Module) -> Linear | Activation:
        if isinstance(layer, nn.Linear):
            self._tensors += [layer.weight, layer.bias]
            return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
        return _BY_MODULE[type(layer)]


def module_forward(
    reader: Reader, chain: Sequence[nn.Module] | None, head: nn.Linear
) -> ModuleForward | None:
    """Return the pass through chain and head, or None where it needs torch."""
    if reader.images or chain is None or head.weight.device.type != "cpu":
        return None
    # Acting drops no features.
    layers = [layer for layer in (*chain, head) if not isinstance(layer, Dropout)]
    if not all(isinstance(layer, nn.Linear) or type(layer) in _BY_MODULE for layer in layers):
        return None
    return ModuleForward(reader, layers)


_NO_STATE: Final[dict[str, Array]] = {}


class Policy(ActorCritic, ActingPolicy):
    """An actor-critic that draws actions and returns their probabilities; construct it with `build`."""

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__(observation_space, action_space, section)
        self._fast: ModuleForward | None = None
        self._draw_with(action_space, self.action_heads, self._cuts, 0)

    def load(self, blob: bytes) -> None:
        load_into(self, blob)

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def initial_state(self, count: int) -> dict[str, Array]:
        return self.memory.initial(count)

    def step(self, row: Mapping[str, Array]) -> Step:
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

    def values(self, observation: Mapping[str, Array]) -> NDArray[np.float32]:
        with torch.inference_mode():
            values: NDArray[np.float32] = self.value(self._tensors(observation)).float().cpu().numpy()
        return values

    def _actor_outputs(self, observation: Mapping[str, Array]) -> Reals:
        if self._fast is None or not self._fast.is_current():
            self._fast = module_forward(self.reader, self.actor_body.chain, self.actor_head)
        if self._fast is not None:
            return self._fast(observation)
        with torch.inference_mode():
            inputs = self.reader.read(self._tensors(observation), self.dtype)
            parameters: Reals = self.actor_head(self.actor_body(inputs)).cpu().numpy()
        return parameters

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        device = self.actor_head.weight.device
        # Copies, because the arrays may be read-only views of a message.
        return {path: torch.from_numpy(np.array(array)).to(device) for path, array in arrays.items()}

    def log_prob(self, observation: Mapping[str, Array], action: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the joint log-probability float32 [N] of stored actions; no gradients."""
        with torch.inference_mode():
            inputs = self.read(self._tensors(observation))
            answer = self.joint_log_prob(self._acting(inputs), self._tensors(action))
        result: NDArray[np.float32] = answer.float().cpu().numpy()
        return result


# ---- A policy of action values.


class QPolicy(Policy):
    """A policy with action values in place of logits; the value of an observation is that of its best action.

    Dueling (Wang et al. 2016, eq. 9): Q = V + A − mean A, with the critic's V and the actor's A. V is the
    same for all actions, so `step` returns A, and the forward pass of acting stays a chain of layers.
    """

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__(observation_space, action_space, section)
        self.combines_heads = section.dueling

    def outputs(self, inputs: Inputs) -> Outputs:
        actor, critic, _ = self._features(inputs)
        values: Tensor = self.actor_head(actor)
        if self.combines_heads:
            values = self.critic_head(critic) + values - values.mean(-1, keepdim=True)
        values = masked(values, inputs.forbidden)
        return Outputs(values, values.amax(-1))

    def value_of(self, inputs: Inputs) -> Tensor:
        return self.outputs(inputs).value


@contextmanager
def _in_float32() -> Iterator[None]:
    """Make tensors of float32 inside the block: an environment may have set another default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(observation_space: Space, action_space: Space, section: PolicySection, seed: int) -> Policy:
    """Return a policy with initial weights; equal arguments give equal weights.

    Orthogonal weights with gain √2 in hidden layers, 0.01 before the actions, 1 before the value
    (Andrychowicz et al. 2021), or with `initialisation="xavier"` those of Glorot and Bengio (2010) in all
    of them, zero biases; a custom network and a recurrent core initialise themselves.

    Raises ValueError that names field and space for an unsupported space, and ConfigurationError for a custom
    network that breaks its contract and for any `kwargs`.
    """
    if section.kwargs:
        raise ConfigurationError(
            f"policy.kwargs={section.kwargs}: this workload's policy takes none; leave it out"
        )
    kind = QPolicy if section.discrete == "epsilon_greedy" else Policy
    with torch.random.fork_rng(devices=()), _in_float32():
        torch.manual_seed(seed)
        policy = kind(observation_space, action_space, section)
    generator = torch.Generator().manual_seed(seed)
    gains: tuple[float | None, ...] = (math.sqrt(2.0), 0.01, 1.0)
    hidden, acting, valuing = gains if section.initialisation == "orthogonal" else (None,) * 3
    for body in (policy.actor_body, policy.critic_body):
        if isinstance(body, Body):
            initialise(body, hidden, generator)
    for core in (policy.memory.actor_core, policy.memory.critic_core):
        if core is not None:
            core.initialise(generator)
    initialise(policy.actor_head, acting, generator)
    initialise(policy.critic_head, valuing, generator)
    policy.seed_actions(seed)
    # Permanently: a layer that differs in training mode would change the ratio of learner and actor.
    return policy.eval()
