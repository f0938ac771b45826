"""Action masks of an environment: which actions it allows next, by the path of the action.

They come under one key, of the observation where that is a Dict that has it, else of `infos` in the form of
Gymnasium's vector environments. The value is one flat mask of all choices, or has the parts of the action
space.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.schema import mask_rules
from penstock.protocol.spaces import Dict, Space, Tuple, parts
from penstock.runtime.exit import Fatal

Rows = dict[str, Any]
"""Arrays [N, ...] by path, masks among them."""


class Masks:
    """Reads the masks of N slots; each is bool [N, n] under `mask/PATH`, true where allowed."""

    def __init__(self, key: str, action_space: Space, slots: int) -> None:
        self._key, self._space, self._slots = key, action_space, slots
        self._sizes = {rule.name: rule.shape[0] for rule in mask_rules(action_space)}
        self._total = sum(self._sizes.values())
        self._steps = np.zeros(slots, np.int64)

    def read(self, observation: Any, infos: dict[str, Any]) -> Rows:
        """Return the masks that came with an observation, bool [N, n] by name.

        Where none came nothing is allowed. observation, infos: of N slots, as a vector environment returns
        them. Raises Fatal for another form.
        """
        is_part = isinstance(observation, dict) and self._key in observation
        given = observation[self._key] if is_part else infos.get(self._key)
        flat = np.zeros((self._slots, self._total), np.bool_)
        if given is not None:
            came = _joined(self._space, given, self._slots)
            if came.shape[1] != self._total:
                raise Fatal(
                    f"environment.mask_key={self._key!r}: masks of {came.shape[1]} choices came, the action "
                    f"space has {self._total}; give one value for each choice"
                )
            flat[:] = came
        cuts = np.split(flat, np.cumsum(list(self._sizes.values()))[:-1], 1)
        return dict(zip(self._sizes, cuts, strict=True))

    def last(self, final: Any, infos: dict[str, Any], slots: NDArray[np.intp]) -> Rows:
        """Return the masks of K last observations, bool [K, n] by name.

        final: object array [N] of single observations. infos: of these. slots: int [K], whose episodes ended.
        """
        given = final[slots[0]]
        if not isinstance(given, dict) or self._key not in given:
            return {name: mask[slots] for name, mask in self.read(None, infos).items()}
        flat = np.concatenate([_joined(self._space, final[slot][self._key], 1) for slot in slots])
        cuts = np.split(flat, np.cumsum(list(self._sizes.values()))[:-1], 1)
        return dict(zip(self._sizes, cuts, strict=True))

    def free(self, rows: Rows, slots: NDArray[np.intp]) -> None:
        """Allow everything, in place, in the slots int [K] whose action will be ignored."""
        for name in self._sizes:
            rows[name][slots] = True

    def keep(self, first: Rows, before: Rows, begins: NDArray[np.bool_]) -> None:
        """Put the masks of `before` into `first` in slots in which no episode begins; begins: bool [N]."""
        for name in self._sizes:
            first[name][~begins] = before[name][~begins]

    def check(self, rows: Rows, begins: NDArray[np.bool_] | None) -> None:
        """Count a step; raises Fatal that names slot and step where nothing is allowed.

        rows: bool [N, n] by name. begins: bool [N], slots in which an episode begins; None: in none.
        """
        self._steps += 1
        if begins is not None:
            self._steps[begins] = 0
        for name in self._sizes:
            allows = rows[name].any(1)
            if not allows.all():
                slot = int(allows.argmin())
                raise Fatal(
                    f"environment.mask_key={self._key!r}: {name} of slot {slot} allows nothing, or was not "
                    f"given, at step {self._steps[slot]} of its episode; the environment must allow at least "
                    "one action"
                )


def _joined(space: Space, given: Any, slots: int) -> NDArray[np.bool_]:
    """A mask of N slots as [N, choices], in the order of the space; leaves that take no mask have none."""
    if isinstance(given, np.ndarray) and given.dtype == object:
        # What Gymnasium makes of tuples: one for each slot, None where a slot gave nothing.
        rows = [np.zeros((1, 0), np.bool_) if one is None else _joined(space, one, 1) for one in given]
        width = max(row.shape[1] for row in rows)
        return np.concatenate([row if row.shape[1] else np.zeros((1, width), np.bool_) for row in rows])
    if isinstance(space, Dict | Tuple) and isinstance(given, dict | tuple):
        named = (
            given if isinstance(given, dict) else dict(zip(map(str, range(len(given))), given, strict=True))
        )
        pieces = [
            _joined(part, named[name], slots) for name, part in parts(space) if _takes(part, named, name)
        ]
        return np.concatenate([np.zeros((slots, 0), np.bool_), *pieces], 1)
    if isinstance(given, tuple | list):
        return np.concatenate([_joined(space, one, slots) for one in given], 1)
    return np.asarray(given).reshape(slots, -1).astype(np.bool_)


def _takes(part: Space, given: dict[str, Any], name: str) -> bool:
    return given.get(name) is not None and bool(mask_rules(part))
