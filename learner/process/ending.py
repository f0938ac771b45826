"""How a learner's loop may end."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.learner.evaluation.evaluation import Result


class Ending(StrEnum):
    """Why the loop ended."""

    TARGET = "target"
    STEPS = "steps"
    UPDATES = "updates"
    EPISODES = "episodes"
    SECONDS = "seconds"
    NO_IMPROVEMENT = "no_improvement"
    STOPPED = "stopped"
    DRAINED = "drained"
    STALLED = "stalled"
    REJECTED = "rejected"
    """The algorithm's own validation rejects what was learned."""
    RECORDING = "recording"
    """The recording that was learned from is at its end."""

    @property
    def finished(self) -> bool:
        """Whether the run is done, and not only this process."""
        return self in {
            Ending.TARGET,
            Ending.STEPS,
            Ending.UPDATES,
            Ending.EPISODES,
            Ending.SECONDS,
            Ending.NO_IMPROVEMENT,
            Ending.REJECTED,
            Ending.RECORDING,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the loop leaves.

    word: what the account says it ended by; of a rejection, the algorithm's own word.
    restored: the evaluation whose weights are the newest version again; None: those of the last update are.
    stalled: why no more updates were made; "" unless that has ended the loop.
    """

    ending: Ending
    word: str
    restored: Result | None
    stalled: str
