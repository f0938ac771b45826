"""What a rollout worker's observations may hold, held against their space before they are sent.

The learner holds every fragment against the same ranges and keeps a session that breaks them out for good, so
an environment that diverges once would have its actor act in vain from then on. Here it ends the actor by
name instead, and one that is started again begins with a reset.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.ranges import observed
from penstock.protocol.spaces import Space, leaves
from penstock.protocol.tensor import Array
from penstock.runtime.exit import Fatal

_OBSERVATION: Final = "observation"


class ObservationBounds:
    """The ranges of every part of an observation, by path."""

    def __init__(self, observation_space: Space) -> None:
        found = {path: observed(leaf) for path, leaf in leaves(observation_space, _OBSERVATION)}
        self._ranges = {path: one for path, one in found.items() if one is not None}

    def replace_terminal(
        self, before: Mapping[str, Any], after: Mapping[str, Any], slots: NDArray[np.intp]
    ) -> None:
        """Put the observation before in the place of one that ended an episode outside its space.

        before, after: of two steps in a row, by path [N, ...]; `after` is changed. slots: int [K], those that
        terminated and are shown their last observation once more before they are reset. A policy reads it
        then, whatever is drawn from it.
        """
        for path, known in self._ranges.items():
            rows = after[path][slots]
            if not known.holds(rows):
                broken = slots[~known.inside(rows).reshape(len(rows), -1).all(1)]
                after[path][broken] = before[path][broken]

    def check(self, tensors: Mapping[str, Array]) -> None:
        """Raise Fatal that names part, value, place and space of what the environment should not have shown.

        tensors: of a fragment, by name, in the shape and dtype of the run's schema. The last observation of a
        terminated episode has no value and may be anything.
        """
        truncated = ~tensors["terminated"].astype(bool)[tensors["final/step"], tensors["final/slot"]]
        try:
            for path, known in self._ranges.items():
                known.check(path, tensors[path])
                known.check(f"final/{path}", tensors[f"final/{path}"][truncated])
        except ValueError as error:
            raise Fatal(
                f"the environment left its observation_space: {error} (step of the fragment, slot, element); "
                "correct the environment, or the bounds that its space states"
            ) from error
