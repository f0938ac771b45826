"""Adam over one flat vector: all parameters of a module live in one tensor, and so do their gradients.

A step, a norm, a copy for a rollback and a finiteness test are then a few kernels each, whatever the
number of layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

_BETA_1 = 0.9
_BETA_2 = 0.999
_SMALL = 32_768
"""Up to so many parameters on the CPU numpy takes the step: torch's calls are a part of the time."""


@dataclass(frozen=True, slots=True)
class Backup:
    """Holds a copy to go back to: parameters and both moments, [P] each, and the count of steps."""

    parameters: Tensor
    first: Tensor
    second: Tensor
    steps: int


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
        """Do `_step` in numpy: more passes over the vector, and cheaper calls."""
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
        """Return a scalar that is finite exactly when parameters and moments are.

        Sums beyond the range of the dtype are the exception.
        """
        return self.parameters.sum() + self.first.sum() + self.second.sum()

    def backup(self) -> Backup:
        """Return a copy of all that `step` changes."""
        return Backup(self.parameters.clone(), self.first.clone(), self.second.clone(), self.steps)

    def restore(self, backup: Backup) -> None:
        """Go back to a copy, in place."""
        self.parameters.copy_(backup.parameters)
        self.first.copy_(backup.first)
        self.second.copy_(backup.second)
        self.steps = backup.steps

    def moments(self) -> dict[str, Tensor]:
        """Return copies of both moments on the CPU, as `first/NAME` and `second/NAME`.

        Each has the shape of its parameter.
        """
        result = {}
        for kind, flat in (("first", self.first), ("second", self.second)):
            for name, parameter, cut in zip(self._names, self.own, self._cuts, strict=True):
                result[f"{kind}/{name}"] = flat[cut].view(parameter.shape).to("cpu", copy=True)
        return result

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `moments` returned, of the shapes of the parameters; steps: taken so far.

        Raises ValueError that names a missing or misshapen one.
        """
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
