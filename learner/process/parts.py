"""The parts that the loop ties together, what the run is for, and how a loop may end."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from broker.log.records import Status
from learner.algorithms.algorithm import Algorithm
from learner.checkpoint.checkpointer import Keeper
from learner.evaluation.evaluation import Evaluation
from learner.evaluation.reported_episodes import Episodes
from learner.feed.feed import Feed
from learner.lease import LeaseKeeper
from learner.ledger import Ledger
from learner.publish.publisher import Publisher
from learner.ranks.leading import Ranks
from learner.recording.recorded_feed import RecordedFeed
from learner.recording.writer import RecordingWriter
from learner.reporting.recorder import Recorder
from learner.reporting.training_clock import TrainingClock
from learner.thread_group import Crew
from penstock.runtime.health import Health


class Ending(StrEnum):
    """Why the loop ended."""

    TARGET = "target"
    STEPS = "steps"
    NO_IMPROVEMENT = "no_improvement"
    STOPPED = "stopped"
    DRAINED = "drained"
    STALLED = "stalled"
    RECORDING = "recording"
    """The recording that was learned from is at its end."""

    @property
    def finished(self) -> bool:
        """Whether the run is done, and not only this process."""
        return self in (Ending.TARGET, Ending.STEPS, Ending.NO_IMPROVEMENT, Ending.RECORDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the loop ties together."""

    algorithm: Algorithm
    feed: Feed | RecordedFeed
    ranks: Ranks
    tee: RecordingWriter | None
    """None: nothing is recorded."""
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

    keep_best: a checkpoint is made whenever an evaluation is asked for. restore_best: at its end the run publishes the weights of its best evaluation again.
    catch_up_through: newest entry that the log held when a learner resumed; 0: nothing to catch up with.
    """

    run: str
    sections: dict[str, str]
    total_steps: int | None
    stop_at_target: bool
    restore_best: bool
    keep_best: bool
    evaluation_timeout_s: float
    budget: int
    evidence_dir: str
    stall_timeout_s: float
    catch_up_through: int = 0
