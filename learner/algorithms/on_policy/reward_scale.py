"""Rewards divided by the running standard deviation of the discounted return; stays in the learner.

Every environment (session, slot) carries its discounted return from one batch to the next. Nothing
changes until `commit`, so that an update that is undone leaves no trace here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.learner.algorithms.shared.rank_group import RankGroup, SingleRankGroup
from penstock.learner.batch import Batch
from penstock.policy.normaliser import Moments, combine, moments

CLIP = 10.0
"""Scaled rewards are clipped to ± this."""
_FLOOR = 1e-8
_MAX_SLOTS = 65_536

SlotKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scaled:
    """rewards: [T, B].   returns, moments: the state after this batch, for `commit`."""

    rewards: Tensor
    returns: dict[SlotKey, float]
    moments: Moments


class RewardScale:
    """State: the running moments of discounted returns, and each environment's return so far.

    The same on every rank: an environment's next columns may come to another one.
    """

    def __init__(self, discount: float, group: RankGroup | None = None) -> None:
        self._discount = discount
        self._group = group or SingleRankGroup()
        self._returns: dict[SlotKey, float] = {}
        zero = torch.zeros(1, dtype=torch.float64)
        self._moments = Moments(torch.zeros((), dtype=torch.float64), zero, zero)

    def scale(self, batch: Batch) -> Scaled:
        """The batch's rewards by the deviation of all returns including its own."""
        rewards = self._group.columns(batch.reward.double()).numpy()
        ended = self._group.columns(batch.terminated | batch.truncated).numpy()
        valid = self._group.columns(batch.valid).numpy()
        slots = self._group.columns(torch.tensor(batch.slots, dtype=torch.int64).reshape(-1, 2).t())
        history, after = self._follow(rewards, ended, _keys(slots))
        seen = torch.from_numpy(history[valid]).unsqueeze(1)
        both = combine(self._moments, moments(seen)) if len(seen) else self._moments
        deviation = float((both.spread[0] / both.count.clamp(min=1.0) + _FLOOR).sqrt())
        return Scaled((batch.reward / deviation).clamp(-CLIP, CLIP), after, both)

    def commit(self, scaled: Scaled) -> None:
        """Take over the state after a batch that was applied."""
        self._moments = scaled.moments
        # Re-inserted keys move to the end, so that the oldest environments are the ones forgotten.
        for key, value in scaled.returns.items():
            self._returns.pop(key, None)
            self._returns[key] = value
        for key in list(self._returns)[: max(0, len(self._returns) - _MAX_SLOTS)]:
            del self._returns[key]

    def state(self) -> dict[str, Tensor]:
        """Tensors that `load` takes."""
        return {
            "slots": torch.tensor(list(self._returns), dtype=torch.int64).reshape(-1, 2),
            "returns": torch.tensor(list(self._returns.values()), dtype=torch.float64),
            "count": self._moments.count.clone(),
            "mean": self._moments.mean.clone(),
            "spread": self._moments.spread.clone(),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`; raises ValueError that names what is missing."""
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise ValueError(f"rewards: {missing} missing; was the state saved with scale_rewards?")
        keys = [(int(session), int(slot)) for session, slot in state["slots"].tolist()]
        self._returns = dict(zip(keys, state["returns"].tolist(), strict=True))
        self._moments = Moments(state["count"].clone(), state["mean"].clone(), state["spread"].clone())

    def _follow(
        self, rewards: NDArray[np.float64], ended: NDArray[np.bool_], slots: tuple[SlotKey, ...]
    ) -> tuple[NDArray[np.float64], dict[SlotKey, float]]:
        """The return after each step, [T, B], and each environment's at the end."""
        history = np.zeros_like(rewards)
        after: dict[SlotKey, float] = {}
        for columns in _waves(slots):
            keys = [slots[column] for column in columns]
            current = np.array([after.get(key, self._returns.get(key, 0.0)) for key in keys])
            for t in range(len(rewards)):
                current = self._discount * current + rewards[t, columns]
                history[t, columns] = current
                current = np.where(ended[t, columns], 0.0, current)
            after.update(zip(keys, current.tolist(), strict=True))
        return history, after


def _keys(slots: Tensor) -> tuple[SlotKey, ...]:
    """Session and slot id of each column, of an int64 [2, B]."""
    return tuple((session, slot) for session, slot in slots.t().tolist())


def _waves(slots: tuple[SlotKey, ...]) -> list[list[int]]:
    """Columns in groups without a repeated environment; later columns of one come in later groups."""
    groups: list[list[int]] = []
    met: dict[SlotKey, int] = {}
    for column, key in enumerate(slots):
        turn = met.get(key, 0)
        met[key] = turn + 1
        if turn == len(groups):
            groups.append([])
        groups[turn].append(column)
    return groups
