"""How learning rate, clip range and entropy coefficient change over a run.

The module holds pure functions and their values.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from penstock.config.settings import LearnerSection
from penstock.learner.algorithms.shared.rank_group import RankGroup, SingleRankGroup

Schedule = Literal["constant", "linear", "cosine"]

_STEERING = 1.5
_TOLERANCE = 2.0
_ERROR_BOUND = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleValues:
    """The scheduled numbers of one update, each named as its setting and its metric.

    None: the algorithm has none.

    learning_rate: step size. entropy_coefficient: weight of the entropy bonus. clip_range: ε of the clipped
    ratio.
    """

    learning_rate: float
    entropy_coefficient: float
    clip_range: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the values that the algorithm has, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}


def factor(schedule: Schedule, progress: float) -> float:
    """Return what the initial value is multiplied by at `progress` (0..1): 1 at the start.

    Linear and cosine end at 0.
    """
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


def decayed(initial: float, decay: float, floor: float, updates: int) -> float:
    """Initial · decay^updates, never below `floor`; without decay (1) it stays the initial value.

    An initial value below the floor is not raised to it: 0 stays 0, and a negative one decays to 0.
    """
    return initial if decay == 1.0 else max(min(floor, initial), initial * decay**updates)


def steered(rate: float, divergence: float, target: float, bounds: tuple[float, float]) -> float:
    """Return the next learning rate after an update that moved the policy by `divergence`, in nats.

    A 1.5th where that is more than twice the target, 1.5 times where it is less than half of it, within
    `bounds`: the rule by which Schulman et al. 2017, section 4, adapt their penalty, applied to the rate.
    """
    if divergence > _TOLERANCE * target:
        rate /= _STEERING
    elif divergence < target / _TOLERANCE:
        rate *= _STEERING
    return min(max(rate, bounds[0]), bounds[1])


def adapted(coefficient: float, divergence: float, target: float, count: int, horizon: float) -> float:
    """Return the next weight of a penalty on a divergence (Ziegler et al. 2019, section 2.2).

    β ← β (1 + clip(KL/target − 1, −0.2, 0.2) · n/horizon), of n = `count` episodes since the last time.
    """
    error = min(max(divergence / target - 1.0, -_ERROR_BOUND), _ERROR_BOUND)
    return coefficient * max(0.0, 1.0 + error * count / horizon)


# ---- What an update runs on, as far as an algorithm must know: its other ranks, precision, compilation.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Describes what the networks of an update run on.

    group: the ranks. bfloat16: networks run in mixed precision. compiled: they go through `torch.compile`.
    """

    group: RankGroup = field(default_factory=SingleRankGroup)
    bfloat16: bool = False
    compiled: bool = False


def hardware_of(section: LearnerSection, group: RankGroup) -> Hardware:
    """Return the hardware that the settings ask for."""
    return Hardware(group=group, bfloat16=section.precision == "bfloat16", compiled=section.compile)
