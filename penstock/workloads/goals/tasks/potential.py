"""Potentials of `Goals-v0` for `environment.reward`: they speed up learning and keep the optimal policy.

environment.reward = [{shape = "penstock.workloads.goals.tasks.potential:health"}]
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_USAGE: Final = slice(0, 3)
"""cpu, memory and disk."""


def health(observation: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return −(cpu + memory + disk), float64 [M], lower for a fuller host."""
    values: NDArray[np.float64] = -observation["observation"][:, _USAGE].sum(1, dtype=np.float64)
    return values
