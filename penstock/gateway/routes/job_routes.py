"""Jobs: trainings that editors submit from templates of the operator, and that every member can follow."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field, WithJsonSchema
from starlette.concurrency import run_in_threadpool

from penstock.gateway.accounts.principal import AccountConflict, Membership
from penstock.gateway.frame.event_stream import EventStream, ending
from penstock.gateway.frame.requests import Answer, ApiError, Body, Line, Number, example
from penstock.gateway.frame.route_access import GuardedRoute, Member, Parts, parts_of
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_dispatcher import AGAIN_S, JobDispatcher, NoTurn
from penstock.gateway.jobs.job_records import (
    CannotBegin,
    CannotLook,
    Job,
    Template,
    shown,
)
from penstock.gateway.jobs.live_jobs import LiveJobs
from penstock.gateway.routes.feedback_routes import Key
from penstock.gateway.store.tables import JobState

# ---- Answers about jobs and their dry runs, as the document describes them.


class NumberShown(Answer):
    """A number of a template that may be chosen. whole: it has no decimals."""

    least: float
    most: float
    default: float
    whole: bool


class TemplateShown(Answer):
    """A template. model: its settings of the model, by names of its kind."""

    name: str
    title: str
    numbers: dict[str, NumberShown]
    model: dict[str, Any]


class TemplateList(Answer):
    """The templates of this gateway."""

    templates: list[TemplateShown]


Figure = Annotated[Any, WithJsonSchema({"type": "number"})]
"""A number of an answer; a whole one stays one."""


class JobShown(Answer):
    """A job. cause: why it failed, in words. result: of a job that finished, by the names of its kind."""

    id: str
    project: str
    agent: str
    template: str
    numbers: dict[str, Figure]
    by: str
    state: JobState
    cause: str
    cancelled_by: str | None
    result: dict[str, Any] | None
    created: datetime
    began: datetime | None
    ended: datetime | None


class JobList(Answer):
    """The newest jobs of a project."""

    jobs: list[JobShown]


class JobCurve(Answer):
    """The curve of a run: columns of one length, oldest first."""

    updates: list[int]
    envSteps: list[int]  # noqa: N815 - as all names of the API
    meanReturn: list[float | None]  # noqa: N815


class ScoresShown(Answer):
    """Figures of scores. mean, std: null without scores."""

    count: int
    mean: float | None
    std: float | None


class FreeMemory(Answer):
    """What was free before the short training. device_memory_bytes: null without a GPU."""

    memory_bytes: int
    device_memory_bytes: int | None


class DryRunShown(Answer):
    """How long a training would take, in seconds, and the peak memory of a short one, in bytes.

    preparation_seconds: part of seconds. measured: the pace of the short training; null if that was the whole
    training. scores: of the initial policy. facts: of the agent now, by names of the kind of template; for
    feedback, its amount and mean.
    """

    environment: str
    workload: str
    seed: int
    total_steps: int
    seconds: float
    preparation_seconds: float
    measured: dict[str, Figure] | None
    memory_bytes: int
    memory_bytes_by_role: dict[str, int]
    device_memory_bytes: int | None
    available: FreeMemory
    scores: dict[str, ScoresShown]
    facts: dict[str, Any]


router = APIRouter(route_class=GuardedRoute, tags=["jobs"])

AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,38}$")]
MAX_NUMBERS: Final = 64
ENDED_LOOK_S: Final = 0.5
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class NewJob(Body):
    """A training of an agent: a template of this gateway, and what is chosen of its numbers."""

    model_config = example(agent="my_agent", template="quick", numbers={"maxSteps": 50})

    agent: AgentName
    template: Line
    numbers: Annotated[dict[Line, Number], Field(max_length=MAX_NUMBERS, default_factory=dict)]


@router.get("/api/projects/{project}/templates", response_model=TemplateList)
def templates(request: Request) -> dict[str, Any]:
    """Return the templates that jobs are made from, with the numbers that may be chosen."""
    dispatcher = parts_of(request).dispatcher
    found = dispatcher.runner.templates() if dispatcher is not None else {}
    return {"templates": list(found.values())}


@router.post("/api/projects/{project}/jobs", status_code=201, response_model=JobShown)
def submit(
    request: Request, member: Member, body: NewJob, idempotency_key: Annotated[Key | None, Header()] = None
) -> dict[str, Any]:
    """Queue a training. With an `Idempotency-Key`, repeating the request returns the same job."""
    return shown(
        queue(
            parts_of(request),
            member,
            agent=body.agent,
            template=body.template,
            numbers=body.numbers,
            request_key=idempotency_key,
        )
    )


@router.get("/api/projects/{project}/jobs", response_model=JobList)
def jobs(
    request: Request,
    member: Member,
    agent: Annotated[str | None, Query(max_length=39)] = None,
    state: JobState | None = None,
) -> dict[str, Any]:
    """Return the newest jobs of a project, newest first; of one agent, in one state."""
    found = parts_of(request).accounts.look(
        lambda session: job_queue.read(session, member.project, agent, state)
    )
    return {"jobs": [shown(one) for one in found]}


@router.get("/api/projects/{project}/jobs/{job}", response_model=JobShown)
def job(request: Request, member: Member, job: str) -> dict[str, Any]:
    """Return a job: its state, the cause where it failed, its result once it has finished."""
    return shown(_find(parts_of(request), member, job))


@router.get("/api/projects/{project}/jobs/{job}/curve", response_model=JobCurve)
def curve(request: Request, member: Member, job: str) -> dict[str, list[float | None]]:
    """Return the curve of a job's run so far: columns of updates, environment steps and mean return."""
    parts, dispatcher = parts_of(request), dispatcher_of(request)
    found = _find(parts, member, job)
    _check_here(found, dispatcher)
    try:
        return dict(dispatcher.runner.read_curve(found.id))
    except OSError as error:
        raise ApiError(409, f"the curve cannot be read: {error.strerror}") from error


@router.post("/api/projects/{project}/estimates", response_model=DryRunShown)
async def estimate(request: Request, member: Member, body: NewJob) -> dict[str, Any]:
    """Return the cost of a training by a dry run, which trains for some seconds and leaves nothing."""
    found = await estimated(request, member, agent=body.agent, template=body.template, numbers=body.numbers)
    return {**found.dry_run, "facts": dict(found.facts)}


@router.post("/api/projects/{project}/jobs/{job}/cancel", response_model=JobShown)
def cancel(request: Request, member: Member, job: str) -> dict[str, Any]:
    """Cancel a job: at once if it is queued, else its processes are stopped and its state changes later."""
    parts, by = parts_of(request), member.principal.subject
    found = parts.accounts.run(
        lambda session, now: job_queue.cancel(session, now, member.project, job, by=by)
    )
    dispatcher_of(request).call()
    return shown(found)


@router.get("/api/projects/{project}/jobs/{job}/log", response_class=EventStream)
async def log(
    request: Request,
    member: Member,
    job: str,
    last_event_id: Annotated[int, Header(ge=0, lt=2**53)] = 0,
) -> EventStream:
    """Send the log of a job as server-sent events, a line each, until the job has ended.

    The id of an event is the byte after its line, at which a browser continues when it reconnects. The last
    event is `state`, or `refused` if the session, the token or the membership ends meanwhile.
    """
    parts, dispatcher = parts_of(request), dispatcher_of(request)
    found = await run_in_threadpool(_find, parts, member, job)
    _check_here(found, dispatcher)
    live: LiveJobs = request.app.state.live
    on_end = parts.limits.begin_stream(member.principal.subject)
    return EventStream(live.follow_log(member, found.id, last_event_id), on_end=on_end)


@router.get("/api/projects/{project}/events", response_class=EventStream)
async def events(request: Request, member: Member, job: Annotated[str, Query(max_length=64)]) -> EventStream:
    """Send the jobs of a project as server-sent events, as they change; of one job also its run.

    `jobs` is the list. For the given job (empty: none), `job` is its row, `curve` the curve of its run, and
    `versions` the versions that its run has registered. `trouble` says what cannot be shown now. `refused` is
    the last event: the session, the token or the membership has ended.
    """
    if job:
        await run_in_threadpool(_find, parts_of(request), member, job)
    live: LiveJobs = request.app.state.live
    on_end = parts_of(request).limits.begin_stream(member.principal.subject)
    return EventStream(live.follow(member, job), on_end=on_end)


def queue(
    parts: Parts,
    member: Membership,
    *,
    agent: str,
    template: str,
    numbers: Mapping[str, float],
    request_key: str | None = None,
    kind: str | None = None,
    more_facts: Mapping[str, Any] = _NOTHING,
) -> Job:
    """Queue a job, once for a key; raises ApiError, AccountError.

    kind: required kind of the template; None: any. more_facts: facts in addition to those of the kind.
    """
    dispatcher = dispatcher_of_parts(parts)
    known = parts.accounts.look(lambda session: job_queue.by_key(session, member.project, request_key))
    found = template_of(dispatcher, template, kind)
    chosen = found.chosen(numbers)
    if known is None:
        facts = {**dispatcher.facts(found, f"{member.project}/{agent}"), **more_facts}
    elif any(known.facts.get(name) != value for name, value in more_facts.items()):
        raise AccountConflict("this key came with another job before: a new job needs a key of its own")
    else:
        facts = dict(known.facts)
    made = parts.accounts.run(
        lambda session, now: job_queue.submit(
            session,
            now,
            member,
            agent=agent,
            template=template,
            numbers=chosen,
            facts=facts,
            request_key=request_key,
        )
    )
    dispatcher.call()
    return made


async def ended(request: Request, job: Job, within_s: float) -> Job:
    """Return a job once it has ended, or as it is after `within_s` seconds.

    It returns earlier when its caller has gone, or the gateway ends.
    """
    accounts, loop, ends = parts_of(request).accounts, asyncio.get_running_loop(), ending(request.scope)
    until_s = loop.time() + within_s
    while job.state.is_open and loop.time() < until_s and not ends.is_set():
        if await request.is_disconnected():
            break
        await asyncio.sleep(ENDED_LOOK_S)
        project, id_ = job.project, job.id
        job = await run_in_threadpool(
            accounts.look, lambda session, project=project, id_=id_: job_queue.get(session, project, id_)
        )
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The numbers of a training, the facts that it would begin with, its dry run, and its recipe."""

    numbers: Mapping[str, float]
    facts: Mapping[str, Any]
    dry_run: Mapping[str, Any]
    recipe: Mapping[str, Any]


async def estimated(
    request: Request,
    member: Membership,
    *,
    agent: str,
    template: str,
    numbers: Mapping[str, float],
    kind: str | None = None,
    more_facts: Mapping[str, Any] = _NOTHING,
) -> Estimate:
    """Return the dry run of a training, which takes some seconds, when it is the turn of the project.

    kind, more_facts: see `queue`. Raises ApiError, AccountError; wrong input is refused before the dry run.
    """
    dispatcher, policy, ends = dispatcher_of(request), f"{member.project}/{agent}", ending(request.scope)

    def described() -> tuple[Template, Mapping[str, float], Mapping[str, Any]]:
        found = template_of(dispatcher, template, kind)
        chosen = found.chosen(numbers)
        return found, chosen, {**dispatcher.facts(found, policy), **more_facts}

    async def goes_on() -> bool:
        return not ends.is_set() and not await request.is_disconnected()

    found, chosen, facts = await run_in_threadpool(described)
    try:
        async with dispatcher.dry_runs.turn(member.project, member.principal.subject, goes_on):
            dry_run = await run_in_threadpool(dispatcher.estimate, found, chosen, policy, facts)
    except NoTurn as error:
        raise ApiError(429 if error.is_own else 503, str(error), retry_s=AGAIN_S) from error
    except CannotBegin as error:
        raise ApiError(409, str(error)) from error
    except CannotLook as error:
        raise ApiError(503, f"{error}: try again", retry_s=10) from error
    return Estimate(numbers=chosen, facts=facts, dry_run=dry_run, recipe=found.recipe)


def template_of(dispatcher: JobDispatcher, name: str, kind: str | None = None) -> Template:
    """Return a template, of one kind where it is given; raises ApiError 422."""
    found = dispatcher.template(name)
    if found is None or kind not in {None, found.kind}:
        raise ApiError(422, "this gateway offers no such template", field="template")
    return found


def dispatcher_of(request: Request) -> JobDispatcher:
    return dispatcher_of_parts(parts_of(request))


def dispatcher_of_parts(parts: Parts) -> JobDispatcher:
    if parts.dispatcher is None:
        raise ApiError(409, "this gateway runs no jobs: its operator starts it with --templates DIR")
    return parts.dispatcher


def _check_here(job: Job, dispatcher: JobDispatcher) -> None:
    if job.place not in {"", dispatcher.runner.place}:
        raise ApiError(409, "the files of this job lie with the gateway of another machine: ask that one")


def _find(parts: Parts, member: Membership, job: str) -> Job:
    return parts.accounts.look(lambda session: job_queue.get(session, member.project, job))
