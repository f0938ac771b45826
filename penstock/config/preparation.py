"""What a workload's preparation of a run is given, and what its rehearsal returns."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.config.estimate import Range, Scores
from penstock.config.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A training of which a rehearsal made a few steps.

    seconds: what they took. whole_seconds: what all will take.
    """

    name: str
    seconds: float
    whole_seconds: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of a short preparation.

    settings: they name what was made, good enough to be run with. scores: of what it was made from.
    """

    settings: Settings
    shortened: tuple[Shortened, ...] = ()
    scores: Mapping[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The callbacks of a long preparation.

    say: tells the user. stop: set when it must end early, by Interrupted.
    """

    say: Callable[[str], None]
    stop: threading.Event
