"""What a workload's preparation of a run is given, and what its rehearsal returns."""

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from penstock.config.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Statistics of scores. mean, std: None without any; std is that of the population."""

    count: int
    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the figures of these scores."""
        if not values:
            return cls(count=0, mean=None, std=None)
        return cls(count=len(values), mean=statistics.fmean(values), std=statistics.pstdev(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of a short preparation.

    settings: they name what was made, good enough to be run with. more_seconds: by which the whole
    preparation takes longer. scores: of what it was made from.
    """

    settings: Settings
    more_seconds: float = 0.0
    scores: Mapping[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The callbacks of a long preparation.

    say: tells the user. stop: set when it must end early, by Interrupted.
    """

    say: Callable[[str], None]
    stop: threading.Event
