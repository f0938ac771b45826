"""Where the loop stands, and what is asked of it: three files that survive a kill at any moment.

    RUN/loop/loop.json      the round, its step, what it has come to, and what became of those before
    RUN/loop/paused.json    there while the loop is to wait: who wants that, why, and until when
    RUN/loop/abandon.json   there until the loop has given up the round that it names
    RUN/loop/rounds/N/      what the steps of a round leave for one another

A step is noted before it begins, with the newest rating that its round learns from: a loop that is killed
goes on with that step, and no two rounds learn from the same new labels.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.weight_files import replace_file

FOLDER: Final = "loop"
_STATE: Final = "loop.json"
_PAUSED: Final = "paused.json"
_ABANDON: Final = "abandon.json"
_ROUNDS: Final = "rounds"
MOST_PAST: Final = 1000
"""Rounds that are remembered."""


class Step(StrEnum):
    """What the loop does."""

    WAITING = "waiting"
    """It waits for labels."""
    RATINGS = "ratings"
    """It leaves out what cannot be believed."""
    REWARD = "reward"
    """It trains the reward model."""
    TRAINING = "training"
    """It trains the policy on what the reward model says of new answers."""
    TRIAL = "trial"
    """The new version is the canary."""


class Outcome(StrEnum):
    """What became of a round."""

    PROMOTED = "promoted"
    WITHDRAWN = "withdrawn"
    UNPROVED = "unproved"
    """Nothing was proved of the canary in time, so it was withdrawn."""
    UNLEARNED = "unlearned"
    """The reward model tells what people like no better than chance, so nothing was trained on it."""
    ABANDONED = "abandoned"
    """Somebody gave it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRound:
    """A round that has ended. labels: new ones in it. version: of the canary, None where there was none."""

    number: int
    outcome: Outcome
    why: str
    labels: int
    version: int | None
    auc: float | None
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where the loop stands.

    number: of the round that goes on, or of the last one. taken: newest rating that rounds which have ended
    learned from. through: newest one that this round learns from. labels: new ones that count, of this round
    or so far. base: version that the round began with. version: that it made. trial_from: newest rating when
    the trial began. auc: of the reward model's thumb on ratings that were held out. note: what it waits for
    beside labels. failure: why a step failed; "" while none has. tries: how often it has failed, one after
    the other. order: how the loop was started. judge: of the newest reward model, its round, weights and
    measures on held-out ratings; empty before the first.
    """

    number: int = 0
    step: Step = Step.WAITING
    taken: int = 0
    through: int = 0
    labels: int = 0
    base: int | None = None
    version: int | None = None
    trial_from: int = 0
    auc: float | None = None
    note: str = ""
    failure: str = ""
    tries: int = 0
    order: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] = field(default_factory=dict)
    past: tuple[PastRound, ...] = ()

    def ended(self, outcome: Outcome, why: str) -> "LoopState":
        """Return the state behind this round, which waits for new labels."""
        done = PastRound(
            number=self.number,
            outcome=outcome,
            why=why,
            labels=self.labels,
            version=self.version,
            auc=self.auc,
            ended_s=time.time(),
        )
        return replace(
            self,
            step=Step.WAITING,
            taken=self.through,
            labels=0,
            base=None,
            version=None,
            auc=None,
            note="",
            failure="",
            tries=0,
            past=(*self.past, done)[-MOST_PAST:],
        )


@dataclass(frozen=True, slots=True)
class Pause:
    """That the loop is to wait. by: who wants it. until_s: Unix seconds; None: until somebody says so."""

    reason: str
    by: str
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abandonment:
    """That a round is to be given up. by: who wants it."""

    number: int
    reason: str
    by: str


def folder_of(run: Path) -> Path:
    """Return the folder of a run's loop, whether it is there or not."""
    return run / FOLDER


def round_folder(folder: Path, number: int) -> Path:
    """Return the folder of a round."""
    return folder / _ROUNDS / str(number)


def read_state(folder: Path) -> LoopState:
    """Return where the loop stands, the beginning where nothing is there.

    Raises ConfigurationError for a file that cannot be read.
    """
    file = folder / _STATE
    try:
        found = json.loads(file.read_bytes())
        past = tuple(PastRound(**{**one, "outcome": Outcome(one["outcome"])}) for one in found["past"])
        return LoopState(**{**found, "step": Step(found["step"]), "past": past})
    except FileNotFoundError:
        return LoopState()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error}); move {folder} away to begin the loop anew"
        ) from error


def write_state(folder: Path, state: LoopState) -> None:
    """Write where the loop stands, whole and on the disk when this returns; raises OSError."""
    replace_file(folder / _STATE, json.dumps(asdict(state), allow_nan=False, indent=1).encode())


def read_pause(folder: Path) -> Pause | None:
    """Return that the loop is to wait, None where it is not."""
    try:
        found = json.loads((folder / _PAUSED).read_bytes())
        until_s = found.get("until_s")
        pause = Pause(str(found["reason"]), str(found["by"]), None if until_s is None else float(until_s))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Pause("", "")  # somebody wanted it: what cannot be read is no leave to go on
    return None if pause.until_s is not None and time.time() >= pause.until_s else pause


def pause(folder: Path, reason: str, by: str, until_s: float | None = None) -> None:
    """Have the loop wait; raises OSError. until_s: Unix seconds; None: until somebody lets it go on."""
    replace_file(folder / _PAUSED, json.dumps(asdict(Pause(reason, by, until_s))).encode())


def resume(folder: Path) -> None:
    """Let the loop go on; a step that failed is tried again."""
    (folder / _PAUSED).unlink(missing_ok=True)


def abandon(folder: Path, reason: str, by: str) -> int:
    """Have the loop give up the round that goes on, and return its number; raises OSError.

    Raises ConfigurationError where none goes on, or where its state cannot be read.
    """
    state = read_state(folder)
    if state.step is Step.WAITING:
        raise ConfigurationError(f"round {state.number + 1} has not begun: there is nothing to abandon")
    replace_file(folder / _ABANDON, json.dumps(asdict(Abandonment(state.number, reason, by))).encode())
    return state.number


def read_abandonment(folder: Path) -> Abandonment | None:
    """Return which round is to be given up; None: none, or nobody can tell which."""
    try:
        found = json.loads((folder / _ABANDON).read_bytes())
        return Abandonment(int(found["number"]), str(found["reason"]), str(found["by"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_abandonment(folder: Path) -> None:
    """The loop has given it up, or it is over by itself."""
    (folder / _ABANDON).unlink(missing_ok=True)
