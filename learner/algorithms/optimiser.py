"""What is trained: Adam over one flat vector, the gradient of a policy, and what a checkpoint holds of both.

All parameters live in one tensor, and so do their gradients: a step, a norm, a copy for a rollback and a
finiteness test are a few kernels each, whatever the number of layers.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Hardware
from penstock.policy.actor_critic import Outputs
from penstock.policy.networks import Inputs, masked
from penstock.policy.policy import Policy

_BETA_1 = 0.9
_BETA_2 = 0.999
_SMALL = 32_768
"""Up to so many parameters on the CPU numpy takes the step: torch's calls are a part of the time."""


GoBack = Callable[[], None]
"""Puts back what it was made from, as it was then; any number of times."""


def flatten(module: nn.Module | Mapping[str, nn.Parameter]) -> Tensor:
    """Move all parameters of a module, or these, into one flat tensor [P] that they become views of."""
    parameters = list(module.parameters() if isinstance(module, nn.Module) else module.values())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([own.numel() for own in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


class FlatAdam:
    """Adam (Kingma and Ba 2015) of every parameter of `module`, or of those that are given by name.

    Moves the parameters into one flat tensor (`parameters`) that they become views of: do not move or
    convert the module afterwards. `own` are the module's parameters in the vector's order.
    Gradients are written into `flat_gradient` or, by parameter, `gradient_views`.
    """

    def __init__(self, module: nn.Module | Mapping[str, nn.Parameter], epsilon: float) -> None:
        named = dict(module.named_parameters() if isinstance(module, nn.Module) else module)
        self._names = list(named)
        self.own = list(named.values())
        ends = list(accumulate(parameter.numel() for parameter in self.own))
        self._cuts = [slice(end - own.numel(), end) for end, own in zip(ends, self.own, strict=True)]
        self._starts = {id(own): cut.start for own, cut in zip(self.own, self._cuts, strict=True)}
        self._epsilon = epsilon
        self.parameters = flatten(named)
        self.first = torch.zeros_like(self.parameters)
        self.second = torch.zeros_like(self.parameters)
        self.flat_gradient = torch.zeros_like(self.parameters)
        self.gradient_views = [
            self.flat_gradient[cut].view_as(own) for cut, own in zip(self._cuts, self.own, strict=True)
        ]
        self.steps = 0
        self._arrays = None
        if self.parameters.device.type == "cpu" and len(self.parameters) <= _SMALL:
            vectors = self.parameters, self.first, self.second, torch.empty_like(self.parameters)
            self._arrays = tuple(vector.numpy() for vector in vectors)

    def stacked(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return views of K of `own`, and of their gradients: [K, *shape] each, and no copies.

        parameters: of one shape, and all as far from the one before.
        """
        first, starts = parameters[0], [self._starts[id(parameter)] for parameter in parameters]
        apart = starts[1] - starts[0] if len(starts) > 1 else first.numel()
        shape, strides = (len(starts), *first.shape), (apart, *first.stride())
        assert starts == [starts[0] + apart * k for k in range(len(starts))]
        assert all(parameter.shape == first.shape for parameter in parameters)
        views = [flat.as_strided(shape, strides, starts[0]) for flat in (self.parameters, self.flat_gradient)]
        return views[0], views[1]

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Return ∂loss/∂parameters by autograd, flat [P]; loss: scalar. The next call reuses the tensor."""
        pieces = torch.autograd.grad(loss, self.own, materialize_grads=True)
        return torch.cat([piece.reshape(-1) for piece in pieces], out=self.flat_gradient)

    def step(self, gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
        """Take one step down `gradient` [P], which is scaled to `max_norm` where longer (0: never), in place.

        Returns the gradient's norm before that, a scalar on the device.
        """
        self.steps += 1
        # first/(√second/root + ε) with both sides times root: one pass less over the vector.
        root = math.sqrt(1.0 - _BETA_2**self.steps)
        rate = learning_rate * root / (1.0 - _BETA_1**self.steps)
        norm: Tensor = torch.linalg.vector_norm(gradient)
        step = self._step if self._arrays is None else self._array_step
        step(gradient, norm, max_norm, rate, self._epsilon * root)
        return norm

    def _step(self, gradient: Tensor, norm: Tensor, max_norm: float, rate: float, epsilon: float) -> None:
        if max_norm > 0:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.first.lerp_(gradient, 1.0 - _BETA_1)
        self.second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1.0 - _BETA_2)
        scale = self.second.sqrt().add_(epsilon)
        self.parameters.addcdiv_(self.first, scale, value=-rate)

    def _array_step(
        self, gradient: Tensor, norm: Tensor, max_norm: float, rate: float, epsilon: float
    ) -> None:
        """`_step` in numpy: more passes over the vector, and cheaper calls."""
        assert self._arrays is not None
        parameters, first, second, change = self._arrays
        slope = gradient.numpy()
        with np.errstate(all="ignore"):
            if max_norm > 0:
                np.multiply(slope, min(1.0, max_norm / (float(norm.numpy()) + 1e-6)), out=slope)
            np.multiply(slope, 1.0 - _BETA_1, out=change)
            np.multiply(first, _BETA_1, out=first)
            np.add(first, change, out=first)
            np.square(slope, out=change)
            np.multiply(change, 1.0 - _BETA_2, out=change)
            np.multiply(second, _BETA_2, out=second)
            np.add(second, change, out=second)
            np.sqrt(second, out=change)
            np.add(change, epsilon, out=change)
            np.divide(first, change, out=change)
            np.multiply(change, rate, out=change)
            np.subtract(parameters, change, out=parameters)

    def checksum(self) -> Tensor:
        """Return a scalar that is finite where parameters, moments and their sums are, and nowhere else."""
        return self.parameters.sum() + self.first.sum() + self.second.sum()

    def backup(self) -> GoBack:
        """Copy parameters, moments and the count of steps."""
        flats, steps = (self.parameters, self.first, self.second), self.steps
        copies = [flat.clone() for flat in flats]

        def go_back() -> None:
            for flat, copy in zip(flats, copies, strict=True):
                flat.copy_(copy)
            self.steps = steps

        return go_back

    def moments(self) -> dict[str, Tensor]:
        """Return copies of both moments on the CPU, `first/NAME` and `second/NAME`, shaped as parameters."""
        result = {}
        for kind, flat in (("first", self.first), ("second", self.second)):
            for name, parameter, cut in zip(self._names, self.own, self._cuts, strict=True):
                result[f"{kind}/{name}"] = flat[cut].view(parameter.shape).to("cpu", copy=True)
        return result

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `moments` returned. Raises ValueError that names a missing or misshapen one."""
        flats = []
        for kind in ("first", "second"):
            for name, parameter in zip(self._names, self.own, strict=True):
                moment = moments.get(f"{kind}/{name}")
                if moment is None or moment.shape != parameter.shape:
                    found = "nothing" if moment is None else tuple(moment.shape)
                    raise ValueError(f"optimiser {kind}/{name}: {found} for {tuple(parameter.shape)}")
                flats.append(moment.reshape(-1).to(self.parameters))
        both = torch.cat(flats)
        self.first.copy_(both[: len(self.first)])
        self.second.copy_(both[len(self.first) :])
        self.steps = steps


class Network:
    """Computes the outputs of a policy and, by autograd, the gradient of a loss of them.

    In mixed precision (autocast) matrix products and convolutions are in bfloat16; weights, what comes out
    here and gradients keep their dtype. Neither this nor compilation is for a policy with a recurrent core
    (`penstock.learner.algorithms.registry.check_hardware` refuses them at start).
    """

    def __init__(self, policy: Policy, optimiser: FlatAdam, hardware: Hardware | None = None) -> None:
        hardware = hardware or Hardware()
        self.policy = policy
        self.optimiser = optimiser
        self._bfloat16 = hardware.bfloat16
        self._is_plain = not (hardware.bfloat16 or hardware.compiled)
        self._forward = torch.compile(self._unmasked) if hardware.compiled else self._unmasked

    def outputs(self, inputs: Inputs) -> Outputs:
        """Return the outputs of M rows, to build a loss on; valid until the next call."""
        if self._is_plain:
            return self.policy.outputs(inputs)
        assert inputs.time is None, "a recurrent core is neither compiled nor in mixed precision"
        device, dtype = self.optimiser.parameters.device.type, self.policy.dtype
        with torch.autocast(device, torch.bfloat16, enabled=self._bfloat16):
            parameters, value = self._forward(inputs.vector, inputs.images)
        return Outputs(masked(parameters.to(dtype), inputs.forbidden), value.to(dtype))

    def _unmasked(self, vector: Tensor, images: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Tensors in and out, as the compiler wants them."""
        outputs = self.policy.outputs(Inputs(vector, images))
        return outputs.parameters, outputs.value

    def log_prob(self, parameters: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """Log π [M] under parameters [M, P], computed as gradient steps compute it."""
        return self.policy.joint_log_prob(parameters, action)

    def gradient(self, loss: Tensor) -> Tensor:
        """Return ∂loss/∂parameters, flat, of a scalar of the latest outputs; the next call reuses it."""
        return self.optimiser.gradient_of(loss)


# ---- What a checkpoint holds: tensors by path, "part/name".


@dataclass(slots=True)
class Trial:
    """The gradient steps of a batch. is_kept: whether they shall stay."""

    is_kept: bool = False


class Trained(Algorithm):
    """An algorithm of which a checkpoint holds modules, optimisers and generators, each by its name.

    An optimiser has the name of the module that it optimises; the only one of an algorithm has the name "".
    """

    policy: Any
    modules: Mapping[str, nn.Module]
    optimisers: Mapping[str, FlatAdam] = MappingProxyType({})
    generators: Mapping[str, torch.Generator] = MappingProxyType({})
    going_on: tuple[str, ...] = ("generator/",)
    """Prefixes of the tensors that a restore leaves as they are."""
    needed: tuple[str, ...] = ("updates", "gradient_steps")
    """Numbers without which a state is refused."""

    def published_modules(self) -> dict[str, nn.Module]:
        return {"default": self.policy}

    @contextmanager
    def undoing(self) -> Iterator[Trial]:
        """Let weights, moments and generators go back at the end of the block, unless its trial is kept."""
        go_back, trial = self._backup(), Trial()
        try:
            yield trial
        finally:
            if not trial.is_kept:
                go_back()

    def _backup(self) -> GoBack:
        learned = [optimiser.backup() for optimiser in self.optimisers.values()]
        drawn = [(random, random.get_state()) for random in self.generators.values()]

        def go_back() -> None:
            for restore in learned:
                restore()
            for random, state in drawn:
                random.set_state(state)

        return go_back

    def state(self) -> AlgorithmState:
        tensors: dict[str, Tensor] = {}
        for name, module in self.modules.items():
            tensors |= copies(name, module)
        for name, optimiser in self.optimisers.items():
            tensors |= {_moments(name) + key: moment for key, moment in optimiser.moments().items()}
        tensors |= {f"generator/{name}": random.get_state() for name, random in self.generators.items()}
        numbers: dict[str, Any] = {"updates": self._updates}
        if self.optimisers:
            steps: dict[str, Any] = {name: optimiser.steps for name, optimiser in self.optimisers.items()}
            numbers["gradient_steps"] = steps.get("", steps)
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def load(self, state: AlgorithmState) -> None:
        missing = [name for name in self.needed if name not in state.numbers]
        drawn = {name: f"generator/{name}" for name in self.generators}
        missing += [path for path in drawn.values() if path not in state.tensors]
        if missing:
            raise ValueError(
                f"algorithm state: {missing[0]} missing; was the run begun with another algorithm?"
            )
        self._load_learned(state)
        for name, random in self.generators.items():
            random.set_state(state.tensors[drawn[name]])
        self._updates = int(state.numbers["updates"])

    def _load_learned(self, state: AlgorithmState) -> None:
        for name, module in self.modules.items():
            load_copies(module, name, state.tensors)
        for name, optimiser in self.optimisers.items():
            steps = state.numbers["gradient_steps"]
            optimiser.load_moments(under(state.tensors, _moments(name)), int(steps[name] if name else steps))

    def restore(self, state: AlgorithmState) -> None:
        self.load(taken_over(self.state(), state, going_on=self.going_on))


def _moments(name: str) -> str:
    return f"optimiser/{name}/" if name else "optimiser/"


def copies(part: str, module: nn.Module) -> dict[str, Tensor]:
    """Return copies on the CPU of what a module's `state_dict` holds. part: first element of their paths."""
    return {
        f"{part}/{key}": value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()
    }


def load_copies(module: nn.Module, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `copies` returned back into a module, all or nothing.

    Raises ValueError that names what is missing or misshapen.
    """
    own, found = module.state_dict(), under(tensors, f"{part}/")
    for key, tensor in own.items():
        if key not in found or found[key].shape != tensor.shape:
            raise ValueError(f"{part}/{key}: missing or not {tuple(tensor.shape)}; is it the same policy?")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(found[key])


def taken_over(own: AlgorithmState, found: AlgorithmState, *, going_on: Collection[str]) -> AlgorithmState:
    """Return `own` with what a restore takes from `found`: tensors, and the optimisers' counts of steps.

    Args:
        own: of the algorithm as it is.
        found: of a checkpoint.
        going_on: prefixes of the tensors that stay as they are, such as generators.

    Raises:
        ValueError: a tensor is missing or has another shape, or the counts of steps are missing.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in own.tensors.items():
        if name.startswith(tuple(going_on)):
            tensors[name] = tensor
        elif name not in found.tensors or found.tensors[name].shape != tensor.shape:
            there = tuple(found.tensors[name].shape) if name in found.tensors else "nothing"
            raise ValueError(f"{name}: {there} for {tuple(tensor.shape)}; it is of another network or space")
        else:
            tensors[name] = found.tensors[name]
    steps: Any = found.numbers.get("gradient_steps")
    if type(steps) is not type(own.numbers["gradient_steps"]):
        raise ValueError("gradient_steps: missing; it is of another algorithm")
    return AlgorithmState(tensors=tensors, numbers=own.numbers | {"gradient_steps": steps})


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose path begins with `prefix`, by the rest of it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
