"""A job, its template and its outcome as callers see them; what runs jobs, steers runs, and adds a kind."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.gateway.accounts.principal import BadInput
from penstock.gateway.store.tables import JobState
from penstock.registry.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training that somebody asked for; the fields are those of `JobRow`."""

    id: str
    project: str
    agent: str
    template: str
    numbers: Mapping[str, float]
    facts: Mapping[str, Any]
    by: str
    state: JobState
    cause: str
    place: str
    cancelled_by: str | None
    result: Mapping[str, Any] | None
    created: datetime
    began: datetime | None
    ended: datetime | None


_Finite = Annotated[float, Field(allow_inf_nan=False)]


class Number(BaseModel):
    """A number of a template that callers may choose, between `least` and `most`, as its file says it.

    whole: it has no decimals. settings: `SECTION.KEY` of the run, and how many times the number each one is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z_]+)+$")], _Finite] = Field(min_length=1)
    least: _Finite
    most: _Finite
    default: _Finite
    whole: bool = False

    @model_validator(mode="after")
    def _may_be_chosen(self) -> Self:
        if not self.least <= self.default <= self.most:
            raise ValueError("`default` must lie between `least` and `most`")
        if self.whole and not self.default.is_integer():
            raise ValueError("`default` must be whole, as the number is")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A configuration that the operator offers, and the numbers in it that callers may choose.

    kind: of the jobs made from it, as a workload calls it; "": a plain training. model: what is shown of the
    configuration.
    """

    name: str
    title: str
    numbers: Mapping[str, Number]
    kind: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)

    def chosen(self, said: Mapping[str, float]) -> dict[str, float]:
        """Return all numbers, those that were not said by default; raises BadInput for one out of bounds."""
        unknown = said.keys() - self.numbers.keys()
        if unknown:
            known = ", ".join(self.numbers) or "none"
            raise BadInput("numbers", f"this template has no such number; its numbers are: {known}")
        return {name: _checked(name, one, said.get(name)) for name, one in self.numbers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Says how a job that began has ended. summary: the run's, None where it left none."""

    state: JobState
    cause: str = ""
    summary: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedVersion:
    """A policy that a job trained, and where it lies.

    version: its label, once for an agent. reward_mean, reward_std: of its answers to prompts that were held
    out, by the reward model; None where there is no such figure.
    """

    version: str
    model_path: str
    reward_model_path: str
    feedback_count: int
    reward_mean: float | None
    reward_std: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What a finished job came to. result: as its callers see it. version: that its agent has from now on."""

    result: Mapping[str, Any]
    version: TrainedVersion | None = None


def shown(job: Job) -> dict[str, Any]:
    """Return a job as its callers see it."""
    hidden = {"place", "facts"}
    return {name: getattr(job, name) for name in Job.__dataclass_fields__ if name not in hidden}


def _checked(name: str, number: Number, said: float | None) -> float:
    value = number.default if said is None else said
    if not number.least <= value <= number.most:
        raise BadInput(name, f"use a number from {number.least:g} to {number.most:g}")
    if number.whole and value != int(value):
        raise BadInput(name, "use a whole number")
    return int(value) if number.whole else value


# ---- What a gateway is handed to have jobs run; `launch` has the one that starts processes on this
# machine.


class Stage(Enum):
    """Says where a job is that a runner has and that has not ended."""

    NOT_BEGUN = "nothing of it was ever started"
    GOING_ON = "its processes live"


class CannotBegin(Exception):
    """Reports a job that cannot be started; the message is the cause that its callers read."""


class CannotLook(Exception):
    """Reports that a runner cannot know now where its jobs are; the message says why. Jobs go on."""


class Runner(Protocol):
    """Starts jobs, finds them again, and ends them. place: its name in the rows of jobs."""

    place: str

    def templates(self) -> Mapping[str, Template]:
        """Return the templates by name."""

    def hold(self) -> AbstractContextManager[bool]:
        """Hold the place, where no other gateway does: True inside the block, and its jobs are this one's."""

    def folder(self, job: str) -> Path:
        """Return the folder of a job, made where it is absent; raises OSError."""

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        """Start the processes of a job, unless they were ever started.

        settings: over its template and numbers, nested as in TOML. Raises CannotBegin, CannotLook, OSError.
        """

    def find(self, job: str) -> Stage | Outcome:
        """Return where a job is, also of one that another gateway started; raises CannotLook."""

    def stop(self, job: str) -> bool:
        """Ask the processes of a job to end; False: there are none yet that could be asked.

        Raises CannotLook.
        """

    def read_log(self, job: str, begin: int, most: int) -> bytes:
        """Return at most `most` bytes of a job's log from byte `begin` on; b"" where there are none yet.

        Raises OSError for one that cannot be read.
        """

    def heard(self, job: str) -> float:
        """Return when a job's run has last written to its log or its metrics, in Unix seconds; 0.0: never."""

    def read_curve(self, job: str) -> Mapping[str, list[Any]]:
        """Return the curve of a job's run as columns of equal length, thinned, oldest first.

        Raises OSError for one that cannot be read.
        """

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the dry run of a job as JSON values; raises CannotBegin, CannotLook, OSError.

        prepare: writes into the folder that it is given, and returns settings as `begin` takes them.
        """


_SHOWN: Final = ("solved", "mean_return", "updates", "policy_version", "training_seconds")


class JobKind(Protocol):
    """What a kind of job needs before it begins, and what is made of it once it has finished.

    `prepare` and `conclude` may be called again for a job, after a gateway was killed in them.
    """

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        """Return what is true of an agent now, for the row of a job; raises an AccountError to refuse it.

        `through` among them is the number of the newest rating that the job reads; without it, it reads none.
        """

    def prepare(
        self, registry: Registry, policy: str, facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Any]:
        """Write what a job reads into its folder; returns the settings that name it.

        policy: `PROJECT/AGENT`, under which the registry has its ratings. facts: of the job.

        Raises OSError where the folder cannot be written.
        """

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        """Return what a finished job came to, with its files where they shall be found.

        taken: labels of the versions that the agent has. folder: of the job, with the run's, `run`, in it;
        the training writes there, so that its files are opened by `penstock.config.run_folder`.
        models: below which models are exported. Raises OSError where files cannot be written, ValueError
        where the run lacks what its kind must leave.
        """


class PlainTraining:
    """A training that needs only its template: its result is what its summary says."""

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        return {}

    def prepare(
        self, registry: Registry, policy: str, facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Any]:
        return {}

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        summary = outcome.summary or {}
        return Conclusion(result={name: finite(summary.get(name)) for name in _SHOWN})


def finite(value: Any) -> Any:
    """Return a value of a summary as JSON has it: a number that is none is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Action(StrEnum):
    """Names what may be wanted of a run that goes on."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    FLUSH = "flush"


class CannotSteer(Exception):
    """Reports that a run refuses what is wanted, or does not answer; the message says why."""


class NoAnswer(CannotSteer):
    """Reports that a run or its registry did not answer: what is wanted may have been done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Says what is wanted of a run.

    name: of a checkpoint, to make or to restore; "" for none. min_steps: that a flush waits for, at least.
    request_id: the same again is the same order, and answers how far it has come.
    """

    action: Action
    name: str = ""
    min_steps: int = 1
    request_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFile:
    """A version of a policy as an open file of safetensors, under a name for who keeps it."""

    name: str
    content: BinaryIO


class Steering(Protocol):
    """Steers the runs of jobs, by the job's id.

    Every method may raise CannotSteer, and NoAnswer where nobody knows what was done. version: by its number
    or its name. by: for the registry's own audit.
    """

    def of(self, policy: str) -> "Steering":
        """Return what steers the runs of one policy, whatever their folders say of it."""

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        """Tell a run that goes on what is wanted, and return how far that has come."""

    def versions(self, job: str) -> Mapping[str, Any]:
        """Return the registered versions of a run, and its traffic."""

    def weights(self, job: str, version: int | str) -> VersionFile:
        """Return a registered version as a file."""

    def promote(
        self, job: str, version: int | str, *, to: str, canary_share: float | None, reason: str, by: str
    ) -> Mapping[str, Any]:
        """Make a version `active` or `canary`, and return it."""

    def roll_back(self, job: str, version: int | str | None, *, reason: str, by: str) -> Mapping[str, Any]:
        """Withdraw a version, the canary or the active one, and return what is active then."""

    def set_traffic(self, job: str, *, reason: str, by: str, **change: Any) -> Mapping[str, Any]:
        """Change which clients get which version, and return the traffic.

        change: canary_share, latest_share and shadow; None: unchanged, and shadow 0: none.
        """
