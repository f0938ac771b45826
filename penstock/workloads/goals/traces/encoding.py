"""A trace as the vector that a policy sees.

    numbers of the observation, by name │ words of the goal, hashed │ last result: there is one, success,
                                                                        error, log(1 + milliseconds)

The last result is that of the decision before in the same episode, so nothing of the future is seen.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.goals.traces.trace_line import Result, Trace

GOAL_WIDTH: Final = 16
_LAST_WIDTH: Final = 4


@dataclass(frozen=True, slots=True)
class Encoding:
    """How traces become vectors, and actions numbers.

    numbers: names of what is observed, in the order of the vector. actions: names, in the order of their
    numbers.
    """

    numbers: tuple[str, ...]
    actions: tuple[str, ...]

    @property
    def width(self) -> int:
        """Return the length of a vector."""
        return len(self.numbers) + GOAL_WIDTH + _LAST_WIDTH

    def observation(self, trace: Trace, before: Result | None) -> NDArray[np.float32]:
        """Return what is seen at a decision, float32 [width]. before: result of the decision before it.

        Raises KeyError for a trace that lacks a number.
        """
        numbers = [trace.observation[name] for name in self.numbers]
        return np.array([*numbers, *_hashed(trace.goal), *_last(before)], np.float32)

    def episodes(self, episodes: Sequence[Sequence[Trace]]) -> NDArray[np.float32]:
        """Return what was seen at every decision, float32 [n, width], episode by episode."""
        rows = [
            self.observation(trace, episode[step - 1].result if step else None)
            for episode in episodes
            for step, trace in enumerate(episode)
        ]
        return np.stack(rows) if rows else np.zeros((0, self.width), np.float32)

    def action(self, name: str) -> int:
        """Return the number of an action; raises ValueError that lists the known ones."""
        if name not in self.actions:
            raise ValueError(f"action={name!r}: not one of {', '.join(self.actions)}")
        return self.actions.index(name)


@lru_cache(maxsize=1024)
def _hashed(goal: str) -> tuple[float, ...]:
    """Words of a text as a signed hash of length 1 (Weinberger et al. 2009); zeros without words."""
    vector = [0.0] * GOAL_WIDTH
    for word in re.findall(r"\w+", goal.lower()):
        digest = blake2b(word.encode(), digest_size=8).digest()
        vector[digest[0] % GOAL_WIDTH] += 1.0 if digest[1] & 1 else -1.0
    length = math.hypot(*vector) or 1.0
    return tuple(one / length for one in vector)


def _last(result: Result | None) -> list[float]:
    if result is None:
        return [0.0] * _LAST_WIDTH
    took = math.log1p(result.execution_time_ms or 0.0)
    return [1.0, float(result.success), float(bool(result.error)), took]
