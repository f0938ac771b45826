"""Course of the learning rate and the clip range over a run; pure functions of its progress 0..1."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def factor(schedule: Schedule, progress: float) -> float:
    """What the initial value is multiplied by: 1 at the start; linear and cosine end at 0."""
    done = min(max(progress, 0.0), 1.0)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))


def warmup(updates: int, warmup_updates: int) -> float:
    """Rises in equal steps to 1 over the first `warmup_updates`; `updates` have been made before."""
    return min(1.0, (updates + 1) / warmup_updates) if warmup_updates else 1.0
