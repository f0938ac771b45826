"""Adam over one flat vector: all parameters of a module live in one tensor, and so do their gradients.

A step, a norm, a copy for a rollback and a finiteness test are then a few kernels each, whatever the
number of layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

_BETA_1 = 0.9
_BETA_2 = 0.999


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
        self._epsilon = epsilon
        self.parameters = flatten(named)
        self.first = torch.zeros_like(self.parameters)
        self.second = torch.zeros_like(self.parameters)
        self.flat_gradient = torch.zeros_like(self.parameters)
        self.gradient_views = [
            self.flat_gradient[cut].view_as(own) for cut, own in zip(self._cuts, self.own, strict=True)
        ]
        self.steps = 0

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Return ∂loss/∂parameters by autograd, flat [P]; loss: scalar. The next call reuses the tensor."""
        pieces = torch.autograd.grad(loss, self.own, materialize_grads=True)
        return torch.cat([piece.reshape(-1) for piece in pieces], out=self.flat_gradient)

    def step(self, gradient: Tensor, learning_rate: float, max_norm: float) -> Tensor:
        """Take one step down `gradient` [P], which is scaled to `max_norm` where longer (0: never), in place.

        Returns the gradient's norm before that, a scalar on the device.
        """
        norm: Tensor = torch.linalg.vector_norm(gradient)
        if max_norm > 0:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.steps += 1
        self.first.lerp_(gradient, 1.0 - _BETA_1)
        self.second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1.0 - _BETA_2)
        # first/(√second/root + ε) with both sides times root: one pass less over the vector.
        root = math.sqrt(1.0 - _BETA_2**self.steps)
        scale = self.second.sqrt().add_(self._epsilon * root)
        rate = learning_rate * root / (1.0 - _BETA_1**self.steps)
        self.parameters.addcdiv_(self.first, scale, value=-rate)
        return norm

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
