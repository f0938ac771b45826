"""A network that follows another one slowly, so that the targets of learning do not move with every step."""

import copy
from typing import Generic, TypeVar

from torch import Tensor, nn

from penstock.learner.algorithms.fast.optimiser import FlatAdam, flatten

M = TypeVar("M", bound=nn.Module)


class Target(Generic[M]):
    """Moves θ' ← (1 − τ) θ' + τ θ at every `period`-th gradient step.

    τ = 1 copies (Mnih et al. 2015), a small τ with period 1 is Polyak averaging (Lillicrap et al. 2016). Only
    parameters follow; inputs are read, and so normalised, by the network that is learned.
    """

    def __init__(self, module: M, online: FlatAdam, *, period: int, rate: float) -> None:
        """Copy `module`, which `online` optimises. rate: τ."""
        self.module: M = copy.deepcopy(module).requires_grad_(requires_grad=False)
        self._flat = flatten(self.module)
        self._online = online
        self._period = period
        self._rate = rate

    def follow(self) -> None:
        """Count a gradient step, and move if it is time."""
        if self._online.steps % self._period == 0:
            self._flat.lerp_(self._online.parameters, self._rate)

    def backup(self) -> Tensor:
        """Return a copy of the parameters."""
        return self._flat.clone()

    def restore(self, backup: Tensor) -> None:
        """Restore such a copy."""
        self._flat.copy_(backup)
