"""The parts that the loop ties together, what the run is for, and how a loop may end."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from broker.state import Status
from learner.algorithm import Algorithm
from learner.crew import Crew
from learner.episodes import Episodes
from learner.evaluation import Evaluation
from learner.feed import Feed
from learner.keeper import Keeper
from learner.lease import LeaseKeeper
from learner.ledger import Ledger
from learner.publisher import Publisher
from learner.ranks.leading import Ranks
from learner.recorder import Recorder
from learner.training_clock import TrainingClock
from penstock.runtime.health import Health


class Ending(StrEnum):
    """Why the loop ended."""

    TARGET = "target"
    STEPS = "steps"
    STOPPED = "stopped"
    DRAINED = "drained"
    STALLED = "stalled"

    @property
    def finished(self) -> bool:
        """Whether the run is done, and not only this process."""
        return self in (Ending.TARGET, Ending.STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the loop ties together."""

    algorithm: Algorithm
    feed: Feed
    ranks: Ranks
    publisher: Publisher
    lease: LeaseKeeper
    ledger: Ledger
    keeper: Keeper
    evaluation: Evaluation
    episodes: Episodes
    recorder: Recorder
    clock: TrainingClock
    crew: Crew
    health: Health
    draining: threading.Event
    reopened: threading.Event
    status: Callable[[], Status]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the run is for. Sections and run name go into every checkpoint.

    catch_up_through: newest entry that the log held when a learner resumed; 0: nothing to catch up with.
    """

    run: str
    sections: dict[str, str]
    total_steps: int | None
    stop_at_target: bool
    evaluation_timeout_s: float
    budget: int
    evidence_dir: str
    stall_timeout_s: float
    catch_up_through: int = 0
