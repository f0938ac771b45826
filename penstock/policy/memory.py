"""The state of a policy within an episode, and all that depends on it.

    frames of before ─► stack ─► reader ─► body ─► recurrent core ─► head
    └──── state/frames/… ───┘                     └ state/actor/h … ┘

State is a dictionary by path, `state/…`, one row per slot; an episode begins with zeros. A policy without
state has an empty one, and none of this costs it anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.settings import PolicySection
from penstock.policy.networks import Inputs, Reader
from penstock.policy.recurrent import HELD, Core, FrameStack, Trajectory, single, single_step, unroll
from penstock.protocol.spaces import Dict, Space, leaves, zeros
from penstock.protocol.tensor import Array


@dataclass(frozen=True, slots=True)
class SeenTrajectory:
    """Inputs of a trajectory. M = T · B rows, step by step.

    observation: stacked, by path, [T, B, ...].
    inputs: of the rows, and with a recurrent core of the K last observations behind them, which follow the
    step
        before.
    lasts: inputs of the last observations where they stand elsewhere; None: there are none.
    starts: bool [T, B] with a recurrent core, see `Trajectory.starts`.
    """

    observation: Mapping[str, Tensor]
    inputs: Inputs
    lasts: Inputs | None
    starts: NDArray[np.bool_] | None = None


class Memory(nn.Module):
    """Holds the parts of a policy that have state."""

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
        """Add cores behind bodies of `width` features, where the section asks for them."""
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
        """Return whether a row's outputs depend on the rows before it beyond its own stack of frames."""
        return self.actor_core is not None

    def initial(self, count: int) -> dict[str, Array]:
        return {path: zeros(leaf, (count,)) for path, leaf in self._state}

    def recall(
        self, actor: Tensor, critic: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run the cores over features [M, F] of both trunks; returns wanted rows, and the newest state."""
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
        joined = inputs if lasts is None else _behind(inputs, lasts)
        return SeenTrajectory(observation, replace(joined, time=time), None, starts)

    def _given(self, path: str, row: Mapping[str, Tensor], like: Tensor) -> Tensor:
        if path in row:
            return row[path]
        leaf = next(leaf for own, leaf in self._state if own == path)
        return torch.from_numpy(zeros(leaf, (len(like),))).to(like.device)

    def _of_cores(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {path: state[path] for path, _ in self._state if not path.startswith("state/frames/")}


def _behind(first: Inputs, second: Inputs) -> Inputs:
    images = zip(first.images, second.images, strict=True)
    return Inputs(torch.cat([first.vector, second.vector]), tuple(torch.cat(pair) for pair in images))
