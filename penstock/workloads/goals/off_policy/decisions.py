"""What was logged, as arrays: each decision with its reward and both policies' probabilities of it."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """The n decisions of E whole episodes; those of one episode stand together, in their order.

    Args:
        episode: int64 [n], 0 to E − 1, rising.
        reward: float64 [n], of each decision.
        log_target: float64 [n], log π of the action under the judged policy; −∞ where it never acts so.
        log_logged: float64 [n], log μ of the action under the policy that acted.
        predicted: float64 [n], a model's return from this decision on, of the action that was taken.
        expected: float64 [n], that model's return averaged over the actions of the judged policy.
        action: int64 [n], what was done, where it is one of n; None: it is something else.

    Raises:
        ValueError: arrays of different lengths, episodes out of order, or a number that cannot be used.
    """

    episode: NDArray[np.int64]
    reward: Floats
    log_target: Floats
    log_logged: Floats
    predicted: Floats
    expected: Floats
    action: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        lengths = {name: len(array) for name, array in given.items() if array is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"decisions: arrays of different lengths: {lengths}")
        steps = np.diff(self.episode, prepend=-1)
        if len(steps) and (steps[0] != 1 or not np.isin(steps, (0, 1)).all()):
            raise ValueError("decisions: episode must count 0, 1, … without a gap, each in one piece")
        if not np.isfinite(self.log_logged).all() or (self.log_logged > 1e-6).any():
            raise ValueError("decisions: log_logged must be the logarithm of a probability above 0")
        if np.isnan(self.log_target).any() or (self.log_target > 1e-6).any():
            raise ValueError("decisions: log_target must be the logarithm of a probability")
        for name in ("reward", "predicted", "expected"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"decisions: {name} must be finite")

    @property
    def episodes(self) -> int:
        """Return E."""
        return int(self.episode[-1]) + 1 if len(self.episode) else 0

    def by_step(self) -> NDArray[np.int64]:
        """Return the index of each decision in its own episode, int64 [n], from 0."""
        starts = np.flatnonzero(np.diff(self.episode, prepend=-1))
        lengths = np.diff(np.append(starts, len(self.episode)))
        return np.arange(len(self.episode)) - np.repeat(starts, lengths)
