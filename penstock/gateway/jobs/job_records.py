"""A job, its template and its outcome; the interfaces of runners, of run control, and of kinds of jobs."""

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
    """A requested training; the fields are those of `JobRow`."""

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
    """A number of a template that callers may choose, between `least` and `most`; fields as in its file.

    whole: it has no decimals. settings: factor by `SECTION.KEY`; each setting becomes number × factor.
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

    kind: of the jobs made from it, as a workload calls it; "": a plain training. model: what callers see of
    the configuration. recipe: the configuration, nested as in TOML.
    """

    name: str
    title: str
    numbers: Mapping[str, Number]
    kind: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def chosen(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return all numbers, with defaults for absent ones; raises BadInput for one out of bounds."""
        unknown = numbers.keys() - self.numbers.keys()
        if unknown:
            known = ", ".join(self.numbers) or "none"
            raise BadInput("numbers", f"this template has no such number; its numbers are: {known}")
        return {name: _checked(name, one, numbers.get(name)) for name, one in self.numbers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job that had begun has ended. summary: of its run, None without one."""

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
    """The result of a finished job as callers see it, and the version that its agent has from now on."""

    result: Mapping[str, Any]
    version: TrainedVersion | None = None


def shown(job: Job) -> dict[str, Any]:
    """Return a job as its callers see it."""
    hidden = {"place", "facts"}
    return {name: getattr(job, name) for name in Job.__dataclass_fields__ if name not in hidden}


def _checked(name: str, number: Number, chosen: float | None) -> float:
    value = number.default if chosen is None else chosen
    if not number.least <= value <= number.most:
        raise BadInput(name, f"use a number from {number.least:g} to {number.most:g}")
    if number.whole and value != int(value):
        raise BadInput(name, "use a whole number")
    return int(value) if number.whole else value


# ---- The interface of runners; `launch` implements it for this machine and for Kubernetes.


class Stage(Enum):
    """The state of a job that has not ended."""

    NOT_BEGUN = "no process of it was ever started"
    GOING_ON = "its processes run"


class CannotBegin(Exception):
    """Reports a job that cannot be started; the message is the cause that its callers read."""


class CannotLook(Exception):
    """Reports that a runner cannot see the state of its jobs now; the message says why. Jobs run on."""


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
        """Return the state of a job, also of one that another gateway started; raises CannotLook."""

    def stop(self, job: str) -> bool:
        """Ask the processes of a job to end; False where none is known yet. Raises CannotLook."""

    def read_log(self, job: str, begin: int, most: int) -> bytes:
        """Return at most `most` bytes of a job's log from byte `begin` on; b"" where there are none yet.

        Raises OSError for one that cannot be read.
        """

    def heard(self, job: str) -> float:
        """Return the Unix time at which a job's run last wrote its log or metrics; 0.0: never."""

    def read_curve(self, job: str) -> Mapping[str, list[Any]]:
        """Return the curve of a job's run as columns of equal length, thinned, oldest first.

        Raises OSError for one that cannot be read.
        """

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the result of a dry run as JSON values; raises CannotBegin, CannotLook, OSError.

        prepare: writes what the job reads into a folder, and returns settings as `begin` takes them.
        """


_SHOWN: Final = ("solved", "mean_return", "updates", "policy_version", "training_seconds")


class JobKind(Protocol):
    """Prepares the jobs of a kind, and exports what they made once they have finished.

    `prepare` and `conclude` may be called again for a job, after a gateway was killed in them.
    """

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        """Return facts about an agent for the row of a new job; raises an AccountError to refuse the job.

        The fact `through` is the number of the newest rating that the job reads; without it, it reads none.
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
        """Export what a finished job made, and return its conclusion.

        taken: labels of the versions that the agent has. folder: of the job, with the run's, `run`, in it;
        the training writes there, so that its files are opened by `penstock.config.run_folder`.
        models: below which models are exported. Raises OSError where files cannot be written, ValueError
        where the run lacks what its kind must leave.
        """


class PlainTraining:
    """The kind of a job that needs only its template: its result comes from the summary of its run."""

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
    """Return a value of a summary for JSON: None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Action(StrEnum):
    """What a running run can be ordered to do."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    FLUSH = "flush"


class CannotSteer(Exception):
    """Reports that a run refuses an order, or does not answer; the message says why."""


class NoAnswer(CannotSteer):
    """Reports that a run or its registry did not answer: the order may have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order to a run.

    name: of a checkpoint, to make or to restore; "" for none. min_steps: fewest steps that a flush waits for.
    request_id: an order with the same id is not carried out twice; its answer tells the progress.
    """

    action: Action
    name: str = ""
    min_steps: int = 1
    request_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFile:
    """A version of a policy as an open file of safetensors. name: for a copy of the file."""

    name: str
    content: BinaryIO


class Steering(Protocol):
    """Controls the runs of jobs, by the job's id.

    Every method may raise CannotSteer, and NoAnswer where it is unknown whether the order was carried out.
    version: its number or its name. by: who orders it, for the audit of the registry.
    """

    def of(self, policy: str) -> "Steering":
        """Return the control of the runs of one policy, whatever policy their folders name."""

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        """Give an order to a running run, and return the progress of the order."""

    def versions(self, job: str) -> Mapping[str, Any]:
        """Return the registered versions of a run, and its traffic."""

    def weights(self, job: str, version: int | str) -> VersionFile:
        """Return a registered version as a file."""

    def promote(
        self, job: str, version: int | str, *, to: str, canary_share: float | None, reason: str, by: str
    ) -> Mapping[str, Any]:
        """Make a version `active` or `canary`, and return it."""

    def roll_back(self, job: str, version: int | str | None, *, reason: str, by: str) -> Mapping[str, Any]:
        """Withdraw a version, the canary or the active one, and return what is active afterwards."""

    def set_traffic(self, job: str, *, reason: str, by: str, **change: Any) -> Mapping[str, Any]:
        """Change which clients get which version, and return the traffic.

        change: canary_share, latest_share and shadow; None: unchanged, and shadow 0: none.
        """
