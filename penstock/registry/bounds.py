"""The bounds of a canary, and what servers see of its trial, by which `canary_trial` judges it.

So many clients of the canary it takes until 95% of drops in return are proved, by the canary's share of the
clients and the size of the drop in deviations among clients (simulated, false alarm 0.05); in the last column
the drop of thumbs, each 1 or 0, from .7 to .4:

    share   drop of 0.5    1.0    2.0    thumbs
    0.01            121     33     14        77
    0.1             125     34     15        74
    0.3             141     41     19        94
    0.5             238     61     24       146
    0.8             510    154     77       356

A client counts once, whatever it plays. Where clients differ little, their means over many episodes differ
less, and a drop is many deviations of those.
"""

import math
from dataclasses import dataclass
from typing import Final

MAX_PART: Final = 0.8
"""Largest part of the judged clients that may be the canary's: among fewer others it takes too long."""
LEVELS: Final = 3
"""How often a client's returns are compared: after a while, 8 and 64 times as long."""
LEVEL_FACTOR: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds within which a canary must stay."""

    false_alarm: float = 0.05
    """Chance that a canary that equals the active version is ever withdrawn or called better."""
    horizon: int = 200
    """Clients of the canary after which one without a verdict is called undecided; it is judged on."""
    error_margin: float = 0.005
    """Share of the canary's answers that may fail where the active version can answer."""
    slow_margin: float = 0.05
    """Rise in the share of slow answers that is tolerated."""

    def __post_init__(self) -> None:
        for name in ("false_alarm", "error_margin"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must lie between 0 and 1")
        if not 0.0 <= self.slow_margin < 1.0:
            raise ValueError(f"slow_margin={self.slow_margin}: must be 0 or more and below 1")
        if self.horizon < 1:
            raise ValueError(f"horizon={self.horizon}: must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReturn:
    """Holds what one client had earned by a certain time after its first episode of the trial began."""

    client: str
    """Digest of its key, by which all servers know it; "" for one without a key, who is dealt an arm anew."""
    level: int
    """Which time: 0, 1, … below LEVELS."""
    canary: bool
    part: float
    """Chance with which the client was assigned to the canary and not to the active version."""
    value: float
    """Mean return of its whole episodes; of an open one as far as it is, where there is no whole one.

    Of a person with opinions: the share of conversations that they liked.
    """
    rated: float | None = None
    """Share of conversations that they gave an opinion of; None: it has returns, and no opinions."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value={self.value}: must be finite; refuse the reward that was not")
        if self.rated is not None and not 0.0 <= self.rated <= 1.0:
            raise ValueError(f"rated={self.rated}: must be between 0 and 1")
        if not 0.0 < self.part < 1.0:
            raise ValueError(f"part={self.part}: must lie between 0 and 1")
        if not 0 <= self.level < LEVELS:
            raise ValueError(f"level={self.level}: must be below {LEVELS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The canary's answers of all clients in a few seconds on one server."""

    answers: int
    failed: int = 0
    """Of them, those that it could not give where the active version could."""
    not_finite: int = 0
    """Of those, the ones whose action, log-probability or value was no number."""
    slower: float | None = None
    """By how much its share of slow answers was higher, in [−1, 1]; None where nothing could be compared."""

    def __post_init__(self) -> None:
        if not 0 <= self.not_finite <= self.failed <= self.answers or self.answers < 1:
            raise ValueError(
                f"answers={self.answers}, failed={self.failed}, not_finite={self.not_finite}: "
                "each must be among the one before"
            )
        if self.slower is not None and not -1.0 <= self.slower <= 1.0:
            raise ValueError(f"slower={self.slower}: must be between -1 and 1")


Seen = ClientReturn | Window
