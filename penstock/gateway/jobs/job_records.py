"""A job as its callers see it, what a template lets them choose, and what a job that ended left."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.gateway.accounts.account_errors import BadInput
from penstock.gateway.store.tables import JobRow, JobState, PolicyVersionRow


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of a template that callers may choose, between `least` and `most`.

    whole: it has no decimals. settings: `SECTION.KEY` of the run, and how many times the number each one is.
    """

    settings: Mapping[str, float]
    least: float
    most: float
    default: float
    whole: bool = False


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


# ---- Which trainings have read ratings that were deleted: what a person is told who asks to be forgotten.


def trained_from(
    session: Session, project: str, deleted: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the jobs that began while a deleted rating of their agent was there, oldest first.

    deleted: numbers of ratings by policy, `PROJECT/AGENT`. A job may have left such a rating out, as one of
    another aspect; none that read one is left out here.
    """
    first = {policy.partition("/")[2]: min(numbers) for policy, numbers in deleted.items() if numbers}
    if not first:
        return []
    began = (JobRow.project == project) & JobRow.agent.in_(first) & JobRow.began.is_not(None)
    jobs = session.scalars(select(JobRow).where(began).order_by(JobRow.number)).all()
    read = [job for job in jobs if job.facts.get("through", 0) >= first[job.agent]]
    own = PolicyVersionRow.id.in_([job.id for job in read])
    rows = session.execute(select(PolicyVersionRow.id, PolicyVersionRow.version).where(own))
    labels = dict(rows.all())
    return [
        {
            "project": project,
            "agent": job.agent,
            "job": job.id,
            "state": job.state,
            "version": labels.get(job.id),
        }
        for job in read
    ]
