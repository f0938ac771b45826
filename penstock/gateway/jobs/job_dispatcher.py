"""Runs the jobs of one place: starts them, stops them, and records how they ended.

    queued ─► taken (the row names this place) ─► begun (the runner has its processes) ─► ended ─► settled

A look takes each job of the place one step further, by its row and its processes. A gateway that was killed
loses nothing by it: the folder of a job shows whether it was ever started, so that it is started once, and a
job that ended meanwhile is settled late. While the database is away, jobs run on and none is settled.
"""

import asyncio
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.gateway.frame.envelope import JOB_HEARD, JOBS, JOBS_ENDED
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import (
    CannotBegin,
    CannotLook,
    Conclusion,
    Job,
    JobKind,
    Outcome,
    PlainTraining,
    Runner,
    Stage,
    Steering,
    Template,
)
from penstock.gateway.store.tables import JobState
from penstock.registry.records import RegistryError
from penstock.registry.registry import Registry

if TYPE_CHECKING:
    from penstock.gateway.accounts.accounts import Accounts

WAIT_S: Final = 120.0
"""Longest wait of a caller for a turn, in seconds."""
MOST_OF_PROJECT: Final = 4
"""Most dry runs of a project that run or wait; of one person or program it is one."""
AGAIN_S: Final = 30.0
"""Seconds after which a caller without a turn may try again."""
TURN_LOOK_S: Final = 0.1


class NoTurn(Exception):
    """Reports that a caller gets no turn now; the message says why, and what to do.

    is_own: the reason is the number of dry runs of the caller, or of the caller's project.
    """

    def __init__(self, message: str, *, is_own: bool) -> None:
        super().__init__(message)
        self.is_own = is_own


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    project: str
    subject: str


class DryRunTurns:
    """The dry runs of one gateway: one at a time, the next of the project served longest ago.

    Safe to use from several threads and event loops.
    """

    def __init__(self, wait_s: float = WAIT_S, look_s: float = TURN_LOOK_S) -> None:
        self._wait_s, self._look_s = wait_s, look_s
        self._changing = threading.Lock()
        self._has_turn: _Ticket | None = None
        self._waiting = list[_Ticket]()
        self._served = dict[str, int]()

    @asynccontextmanager
    async def turn(
        self, project: str, subject: str, is_wanted: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Hold the turn inside the block; raises NoTurn.

        is_wanted: returns whether the caller still waits for the dry run.
        """
        ticket = self._ask(project, subject)
        try:
            until_s = asyncio.get_running_loop().time() + self._wait_s
            while not self._take(ticket):
                if asyncio.get_running_loop().time() >= until_s or not await is_wanted():
                    raise NoTurn(
                        f"dry runs of others have taken {self._wait_s:g} s: ask again, or train without one",
                        is_own=False,
                    )
                await asyncio.sleep(self._look_s)
            yield
        finally:
            self._leave(ticket)

    def _ask(self, project: str, subject: str) -> _Ticket:
        with self._changing:
            there = [*self._waiting, *([self._has_turn] if self._has_turn is not None else [])]
            if any(one.subject == subject for one in there):
                raise NoTurn("a dry run of yours goes on or waits: ask again when it is done", is_own=True)
            if sum(one.project == project for one in there) >= MOST_OF_PROJECT:
                raise NoTurn(
                    f"{MOST_OF_PROJECT} dry runs of this project go on or wait: ask again when one is done",
                    is_own=True,
                )
            ticket = _Ticket(project, subject)
            self._waiting.append(ticket)
            return ticket

    def _take(self, ticket: _Ticket) -> bool:
        with self._changing:
            if self._has_turn is not None:
                return False
            if ticket is not min(self._waiting, key=lambda one: self._served.get(one.project, 0)):
                return False
            self._waiting.remove(ticket)
            self._has_turn = ticket
            self._served[ticket.project] = max(self._served.values(), default=0) + 1
            return True

    def _leave(self, ticket: _Ticket) -> None:
        with self._changing:
            if self._has_turn is ticket:
                self._has_turn = None
            else:
                self._waiting.remove(ticket)


LOOK_S: Final = 1.0
"""Seconds between two looks at the jobs."""
AT_ONCE: Final = 1
"""Jobs of a place that run at the same time, by default."""

log = logging.getLogger(__name__)


class JobDispatcher:
    """The jobs of one place.

    kinds: kinds of jobs of workloads, by the name in templates. models: folder below which models are
    exported. at_once: most jobs that run at the same time. steering: controls their runs. registry_url: of
    `registry`, in which runs register their versions as those of `PROJECT/AGENT`; "": each run has its own.
    """

    def __init__(
        self,
        accounts: "Accounts",
        registry: Registry,
        runner: Runner,
        kinds: Mapping[str, JobKind],
        *,
        models: Path,
        at_once: int = AT_ONCE,
        steering: Steering | None = None,
        registry_url: str = "",
    ) -> None:
        self.runner = runner
        self.steering = steering
        self.dry_runs = DryRunTurns()
        self._models = models
        self._accounts = accounts
        self._registry = registry
        self._registry_url = registry_url
        self._kinds = {"": PlainTraining(), **kinds}
        self._at_once = at_once
        self._stopping = set[str]()
        self._called = threading.Event()
        for state in JobState:
            if not state.is_open:
                JOBS_ENDED.labels(state)  # there at 0 before the first one: a rise is seen

    def call(self) -> None:
        """Make the next look begin now; safe from any thread."""
        self._called.set()

    def work(self, end: threading.Event) -> None:
        """Look until `end` is set, while no other gateway holds the place; the body of a thread."""
        while not end.is_set():
            with self.runner.hold() as own:
                while own and not end.is_set():
                    self._look_safely()
                    self._called.wait(LOOK_S)
                    self._called.clear()
            end.wait(LOOK_S)

    def look(self) -> None:
        """Take queued jobs while there is room; start, stop and settle the jobs of the place."""
        place = self.runner.place
        while self._accounts.run(lambda session, now: job_queue.claim(session, now, place, self._at_once)):
            pass
        jobs = self._accounts.look(lambda session: job_queue.at_place(session, place))
        for job in jobs:
            self._look_at(job)
        JOB_HEARD.set(min((self.runner.heard(job.id) for job in jobs), default=0.0))
        for state, count in self._accounts.look(job_queue.open_counts).items():
            JOBS.labels(state).set(count)

    def template(self, name: str) -> Template | None:
        """Return a template, None where there is none of that name and kind."""
        found = self.runner.templates().get(name)
        return found if found is not None and found.kind in self._kinds else None

    def facts(self, template: Template, policy: str) -> Mapping[str, Any]:
        """Return what the kind of a template records about the policy `PROJECT/AGENT` for a new job."""
        return self._kinds[template.kind].facts(self._registry, policy)

    def estimate(
        self, template: Template, numbers: Mapping[str, float], policy: str, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the result of a dry run as JSON values, for a caller that holds the turn.

        It trains for some seconds, on the cores that jobs have. Raises CannotBegin, and CannotLook where the
        runner does not answer.
        """
        try:
            prepare = self._kinds[template.kind].prepare
            return self.runner.estimate(
                template.name, numbers, lambda folder: prepare(self._registry, policy, facts, folder)
            )
        except OSError as error:
            raise CannotBegin(f"the dry run could not be made: {_why(error)}") from error

    def _look_safely(self) -> None:
        try:
            self.look()
        except (RegistryError, CannotLook) as error:
            log.warning("jobs continue; their results are recorded later", extra={"error": str(error)})
        except Exception:
            log.exception("a look at the jobs failed: the next one tries again")

    def _look_at(self, job: Job) -> None:
        found = self.runner.find(job.id)
        if isinstance(found, Outcome):
            self._settle(job, found)
        elif found is Stage.NOT_BEGUN and job.cancelled_by is not None:
            self._settle(job, Outcome(state=JobState.CANCELLED, cause="cancelled before it began"))
        elif found is Stage.NOT_BEGUN:
            self._begin(job)
        elif job.cancelled_by is not None and job.id not in self._stopping and self.runner.stop(job.id):
            self._stopping.add(job.id)

    def steering_of(self, job: Job) -> Steering | None:
        """Return what controls the run of a job of this place; None for a job of another place."""
        if job.place != self.runner.place or self.steering is None:
            return None
        return self.steering.of(_policy(job))

    def _begin(self, job: Job) -> None:
        try:
            folder, policy = self.runner.folder(job.id), _policy(job)
            settings = self._kind(job).prepare(self._registry, policy, job.facts, folder)
            if self._registry_url:  # the versions of the run become those of its agent's policy
                registry = {"registry": {"url": self._registry_url}, "serving": {"policy": policy}}
                settings = {**settings, "run": job.id, **registry}
            self.runner.begin(job, settings)
        except OSError as error:
            self._settle(job, _failed(f"it could not be begun: {_why(error)}"))
        except CannotBegin as error:
            self._settle(job, _failed(f"it could not be begun: {error}"))

    def _settle(self, job: Job, outcome: Outcome) -> None:
        made: Conclusion | None = None
        if job.cancelled_by is not None and outcome.state is not JobState.FINISHED:
            outcome = Outcome(state=JobState.CANCELLED, cause=outcome.cause)
        if outcome.state is JobState.FINISHED:
            outcome, made = self._conclude(job, outcome)
        if made is not None and made.version is not None:
            self._name_version(job, made.version.version)
        self._accounts.run(lambda session, now: job_queue.settle(session, now, job.id, outcome, made))
        JOBS_ENDED.labels(outcome.state).inc()
        self._stopping.discard(job.id)
        log.info("a job has ended", extra={"job": job.id, "state": outcome.state, "cause": outcome.cause})

    def _conclude(self, job: Job, outcome: Outcome) -> tuple[Outcome, Conclusion | None]:
        taken = self._accounts.look(lambda session: job_queue.version_labels(session, job.project, job.agent))
        try:
            kind, folder = self._kind(job), self.runner.folder(job.id)
            return outcome, kind.conclude(job, outcome, taken, folder=folder, models=self._models)
        except OSError as error:
            return _failed(f"its training finished; what it made was not exported: {_why(error)}"), None
        except (ValueError, CannotBegin) as error:
            return _failed(f"its training finished; what it made was not exported: {error}"), None

    def _name_version(self, job: Job, label: str) -> None:
        """Give the newest version that a job's run has registered the label of the exported version.

        The name of a run begins with its job's id.
        """
        policy, run = f"{job.project}/{job.agent}", f"{job.id}-"
        own = [one.version for one in self._registry.list(policy) if one.run.startswith(run)]
        if own:
            self._registry.name(policy, max(own), label)

    def _kind(self, job: Job) -> JobKind:
        template = self.template(job.template)
        if template is None:
            raise CannotBegin(f"the gateway offers no template {job.template!r} any more")
        return self._kinds[template.kind]


def _policy(job: Job) -> str:
    return f"{job.project}/{job.agent}"


def _why(error: OSError) -> str:
    """Return the reason of an error of a disk; copying a folder raises one with a reason for each file."""
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    return error.strerror or str(error)


def _failed(cause: str) -> Outcome:
    return Outcome(state=JobState.FAILED, cause=cause)
