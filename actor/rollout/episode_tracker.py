"""Which episode each slot is in, and the episodes that an unroll finished."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.fragment import Slot
from penstock.protocol.messages import Episode


@dataclass(frozen=True, slots=True)
class Ends:
    """K ends in order of time: slot int [K] and step (row of the unroll) int [K]."""

    slot: NDArray[np.int32]
    step: NDArray[np.int32]


class Episodes:
    """Running return and length of N slots across unrolls."""

    def __init__(self, slots: int) -> None:
        self._episode_id = [0] * slots
        self._return = np.zeros(slots, np.float64)
        self._length = np.zeros(slots, np.int64)

    def slots(self) -> tuple[Slot, ...]:
        """Return episode and index of the next step of every slot."""
        lengths = self._length.tolist()
        return tuple(Slot(n, self._episode_id[n], lengths[n]) for n in range(len(lengths)))

    def advance(
        self,
        reward_TN: NDArray[np.float32],  # noqa: N803 - axes in the name
        valid_TN: NDArray[np.bool_],  # noqa: N803
        terminated_TN: NDArray[np.bool_],  # noqa: N803
        ends: Ends,
        version: int,
    ) -> list[Episode]:
        """Count an unroll of T steps of N slots and return the episodes that it finished.

        reward_TN: float32 [T, N], 0 where valid_TN is False. valid_TN, terminated_TN: bool [T, N]. version:
        of the weights it acted with.
        """
        total = np.cumsum(reward_TN, axis=0, dtype=np.float64)
        steps = np.cumsum(valid_TN, axis=0, dtype=np.int64)
        finished = [
            self._end(slot, total[step, slot], steps[step, slot], bool(terminated_TN[step, slot]), version)
            for slot, step in zip(ends.slot.tolist(), ends.step.tolist(), strict=True)
        ]
        self._return += total[-1]
        self._length += steps[-1]
        return finished

    def _end(self, slot: int, total: float, steps: int, terminated: bool, version: int) -> Episode:
        episode = Episode(
            slot_id=slot,
            episode_id=self._episode_id[slot],
            episode_return=float(self._return[slot] + total),
            length=int(self._length[slot] + steps),
            terminated=terminated,
            version=version,
        )
        self._episode_id[slot] += 1
        # The sums of this unroll up to here belong to the episode that ended.
        self._return[slot] = -total
        self._length[slot] = -steps
        return episode
