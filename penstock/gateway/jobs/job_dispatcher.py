"""Has the jobs of one place run, and sees them end.

    queued ─► taken (the row names this place) ─► begun (the runner has its processes) ─► ended ─► settled

A look goes over all jobs of the place and does for each what its row and its processes ask for. Nothing is
remembered between two looks that a gateway which was killed would have to remember: whether a job was ever
started is known from its folder, so that it is started once, and what ended meanwhile is settled late. While
the database is away, jobs go on and nothing is settled.
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
"""Longest time in which a caller waits for a turn."""
MOST_OF_PROJECT: Final = 4
"""Dry runs of a project that go on or wait; of one person or program it is one."""
AGAIN_S: Final = 30.0
"""After which who had no turn may ask again."""
TURN_LOOK_S: Final = 0.1


class NoTurn(Exception):
    """Reports a caller who gets no turn now; the message says why, and what to do.

    is_own: they, or their project, have as many as they may have.
    """

    def __init__(self, message: str, *, is_own: bool) -> None:
        super().__init__(message)
        self.is_own = is_own


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    project: str
    subject: str


class DryRunTurns:
    """The turns of one gateway; safe between threads and event loops."""

    def __init__(self, wait_s: float = WAIT_S, look_s: float = TURN_LOOK_S) -> None:
        self._wait_s, self._look_s = wait_s, look_s
        self._changing = threading.Lock()
        self._has_turn: _Ticket | None = None
        self._waiting = list[_Ticket]()
        self._served = dict[str, int]()

    @asynccontextmanager
    async def turn(
        self, project: str, subject: str, goes_on: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Have the turn inside the block; raises NoTurn.

        goes_on: whether a caller still waits for it.
        """
        ticket = self._ask(project, subject)
        try:
            until_s = asyncio.get_running_loop().time() + self._wait_s
            while not self._take(ticket):
                if asyncio.get_running_loop().time() >= until_s or not await goes_on():
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
"""Seconds between two looks where nothing is asked for."""
AT_ONCE: Final = 1
"""Jobs of a place that run at the same time, unless the operator says otherwise."""

log = logging.getLogger(__name__)


class JobDispatcher:
    """The jobs of one place.

    kinds: what workloads add, by the name that templates give. models: folder below which models are
    exported. at_once: jobs that run at the same time. steering: of their runs. registry_url: of `registry`,
    in which runs register their versions as those of `PROJECT/AGENT`; "": each run has a registry of its own.
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
        self._asked_to_end = set[str]()
        self._called = threading.Event()
        for state in JobState:
            if not state.is_open:
                JOBS_ENDED.labels(state)  # there at 0 before the first one: a rise is seen

    def call(self) -> None:
        """Have the dispatcher look soon: something was asked for."""
        self._called.set()

    def work(self, end: threading.Event) -> None:
        """Look until `end` is set, as long as no other gateway has the place; a thread's body."""
        while not end.is_set():
            with self.runner.hold() as own:
                while own and not end.is_set():
                    self._look_safely()
                    self._called.wait(LOOK_S)
                    self._called.clear()
            end.wait(LOOK_S)

    def look(self) -> None:
        """Take what is queued and there is room for; begin, end and settle what asks for it."""
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
        """Return what the kind of a template wants to be known of `PROJECT/AGENT` when a job is asked for."""
        return self._kinds[template.kind].facts(self._registry, policy)

    def estimate(
        self, template: Template, numbers: Mapping[str, float], policy: str, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the dry run of a job as JSON values, for a caller whose turn it is.

        Raises CannotBegin, and CannotLook where who would make it does not answer. It trains for some
        seconds, on the cores that jobs have.
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
            log.warning("jobs go on, unsettled", extra={"error": str(error)})
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
        elif self._is_to_be_asked(job) and self.runner.stop(job.id):
            self._asked_to_end.add(job.id)

    def _is_to_be_asked(self, job: Job) -> bool:
        return job.cancelled_by is not None and job.id not in self._asked_to_end

    def steering_of(self, job: Job) -> Steering | None:
        """Return what steers the run of a job that this place runs; None where nothing does."""
        if job.place != self.runner.place or self.steering is None:
            return None
        return self.steering.of(_policy(job))

    def _begin(self, job: Job) -> None:
        try:
            folder, policy = self.runner.folder(job.id), _policy(job)
            settings = self._kind(job).prepare(self._registry, policy, job.facts, folder)
            self.runner.begin(job, {**settings, **self._place_in_registry(job, policy)})
        except OSError as error:
            self._settle(job, _failed(f"it could not be begun: {_why(error)}"))
        except CannotBegin as error:
            self._settle(job, _failed(f"it could not be begun: {error}"))

    def _place_in_registry(self, job: Job, policy: str) -> dict[str, Any]:
        """Return the settings by which the versions of a run are arms of its agent's policy."""
        if not self._registry_url:
            return {}
        return {
            "run": job.id,
            "registry": {"url": self._registry_url},
            "serving": {"policy": policy},
        }

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
        self._asked_to_end.discard(job.id)
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
        """Let the newest version that a run has registered be asked for by the label of what was exported.

        A run is called by its job's id, and a word of its own behind it.
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
    """Return what a disk says; the copy of a folder says it of each file that it could not copy."""
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    return error.strerror or str(error)


def _failed(cause: str) -> Outcome:
    return Outcome(state=JobState.FAILED, cause=cause)
