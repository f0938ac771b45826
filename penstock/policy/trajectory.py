"""Trajectories that a policy with state learns from: steps in time, and its state before them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """T rows of B columns in time, and K true last observations.

    observation: by path, [T, B, ...], masks among them.
    state: by path, [B, ...], before row 0.
    begins: bool [T, B], the row is the first of an episode.
    ends: bool [T, B], the episode ends with the step (a row fewer will do).
    final_observation: by path, [K, ...]; the one that followed row final_step[k] of column final_slot[k]
        (int64 [K]).
    """

    observation: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    begins: Tensor
    ends: Tensor
    final_observation: Mapping[str, Tensor]
    final_slot: Tensor
    final_step: Tensor

    def starts(self) -> NDArray[np.bool_]:
        """Return bool [T, B] on the CPU: True where a row does not continue the one before it."""
        starts: NDArray[np.bool_] = self.begins.cpu().numpy().copy()
        starts[1:] |= self.ends[: len(starts) - 1].cpu().numpy()
        return starts


def single_step(observation: Mapping[str, Tensor], state: Mapping[str, Tensor], held: Tensor) -> Trajectory:
    """Return one row of M columns, [M, ...] each; held: bool [M], False where an episode begins."""
    none = held.new_zeros(0, dtype=torch.int64)
    return Trajectory(
        observation={path: value.unsqueeze(0) for path, value in observation.items()},
        state=state,
        begins=~held.unsqueeze(0),
        ends=torch.zeros_like(held).unsqueeze(0),
        final_observation={path: value[:0] for path, value in observation.items()},
        final_slot=none,
        final_step=none,
    )
