"""AdamW over named parameters, with a state that a checkpoint holds and an update can go back to."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BETAS = (0.9, 0.98)


@dataclass(frozen=True, slots=True)
class Copy:
    """All that a step changes."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    steps: int


class ThoughtAdam:
    """Owns parameters from now on."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], epsilon: float) -> None:
        self._parameters = dict(parameters)
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=0.0, betas=_BETAS, eps=epsilon, weight_decay=0.0
        )
        self.steps = 0
        """Steps made."""
        self._fill({name: torch.zeros_like(one) for name, one in self._by_moment()}, 0)

    def clear(self) -> None:
        """Begin the gradients anew."""
        self._optimiser.zero_grad()

    def step(self, rate: float, max_norm: float) -> float:
        """Make a step down the gradients and return their norm before it was cut to `max_norm`; 0: uncut."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_norm or float("inf"))
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self.steps += 1
        return float(norm)

    def moments(self) -> dict[str, Tensor]:
        """Return copies of the moments, by `NAME/moment`."""
        return {
            f"{name}/{moment}": self._optimiser.state[one][moment].clone()
            for name, one in self._parameters.items()
            for moment in _MOMENTS
        }

    def load_moments(self, found: Mapping[str, Tensor], steps: int) -> None:
        """Become what `moments` was taken from; raises ValueError that names what is missing or misshapen."""
        for name, one in self._by_moment():
            if name not in found or found[name].shape != one.shape:
                raise ValueError(f"optimiser/{name}: missing or not {tuple(one.shape)}")
        self._fill(found, steps)

    def copy(self) -> Copy:
        """Return all that a step changes."""
        parameters = {name: one.detach().clone() for name, one in self._parameters.items()}
        return Copy(parameters, self.moments(), self.steps)

    @torch.no_grad()
    def go_back(self, copy: Copy) -> None:
        """Become what `copy` was taken from."""
        for name, one in self._parameters.items():
            one.copy_(copy.parameters[name])
        self._fill(copy.moments, copy.steps)

    def _by_moment(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"{name}/{moment}", one) for name, one in self._parameters.items() for moment in _MOMENTS]

    def _fill(self, moments: Mapping[str, Tensor], steps: int) -> None:
        for name, one in self._parameters.items():
            self._optimiser.state[one] = {
                "step": torch.tensor(float(steps)),
                **{moment: moments[f"{name}/{moment}"].detach().clone() for moment in _MOMENTS},
            }
        self.steps = steps
