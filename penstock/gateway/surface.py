"""What the routes of workloads import; the rest of the gateway is none of theirs.

A workload's record names in `http` a function that returns a `Service`: a router of `GuardedRoute`, who may
call each of its routes, and the kinds of jobs behind them.

    Membership, member_of     who calls, and in which project, of a route that asks for a role
    queue, versions_of        trainings of an agent, and what they made; version_of: one of them
    estimate                  the dry run of one
    ended                     waits until one has ended
    state_folder              where the gateway keeps what it has on this machine
    noted                     has the audit say what somebody asks for
    Page                      an answer that is a page
    Answer, answers           what an answer holds, for the document
    ApiError                  an answer other than success

It may also name in `site` a function that returns a `Site`: an application of its own over one run.

    Upstream, RunAddresses    where that run is
    RunSettings               what it was begun with
    ServedText                the client of its server of text
    Loop                      a command that learns from what people say of it
    file_answer, console_file a file of a page, or of the console, for a page that looks like it
    caller_of, is_editor      who calls it, and whether they look after it
    add_error_handlers        makes errors answers, as those of the gateway
    ERROR_SCHEMA, error_answer    how they are described
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from penstock.gateway.accounts.principal import Membership
from penstock.gateway.application import Service
from penstock.gateway.event_text import event
from penstock.gateway.feedback.feedback_rows import AgentId, Key
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.api_errors import add_handlers as add_error_handlers
from penstock.gateway.frame.audited_calls import audited
from penstock.gateway.frame.parts import parts_of
from penstock.gateway.frame.requests import NUMERIC, Answer, Body, Line, Number, answers, example, storable
from penstock.gateway.frame.route_access import ERROR_SCHEMA, Access, GuardedRoute, error_answer, member_of
from penstock.gateway.frame.server_end import ANSWER_S, EventStream, ending
from penstock.gateway.jobs import job_queue, policy_versions
from penstock.gateway.jobs.job_kinds import JobKind, finite
from penstock.gateway.jobs.job_records import Conclusion, Job, Outcome, TrainedVersion
from penstock.gateway.routes import job_routes
from penstock.gateway.routes.console_routes import Page, console_file, file_answer
from penstock.gateway.routes.job_routes import Estimate
from penstock.gateway.satisfaction import LEAST, THUMB, Satisfaction, satisfaction, share_of
from penstock.gateway.sites.json_route import Handler, JsonRoute
from penstock.gateway.sites.run_errors import answered, not_yet, of_run
from penstock.gateway.sites.served_text import ServedText
from penstock.gateway.sites.site import Loop, RunAddresses, RunSettings, Site, Upstream, caller_of, is_editor
from penstock.gateway.store.tables import JobState, PolicyVersionRow
from penstock.registry.ratings import KeptRating
from penstock.registry.registry import Registry

__all__ = [
    "ANSWER_S",
    "ERROR_SCHEMA",
    "LEAST",
    "NUMERIC",
    "THUMB",
    "Access",
    "AgentId",
    "Answer",
    "ApiError",
    "Body",
    "Conclusion",
    "Estimate",
    "EventStream",
    "GuardedRoute",
    "Handler",
    "Job",
    "JobKind",
    "JobState",
    "JsonRoute",
    "Key",
    "Line",
    "Loop",
    "Membership",
    "Number",
    "Outcome",
    "Page",
    "RunAddresses",
    "RunSettings",
    "Satisfaction",
    "ServedText",
    "Service",
    "Site",
    "TrainedVersion",
    "Upstream",
    "add_error_handlers",
    "answered",
    "answers",
    "caller_of",
    "console_file",
    "ended",
    "error_answer",
    "estimate",
    "event",
    "example",
    "file_answer",
    "finite",
    "is_editor",
    "member_of",
    "not_yet",
    "noted",
    "of_run",
    "queue",
    "ratings_of",
    "satisfaction",
    "share_of",
    "state_folder",
    "storable",
    "version_of",
    "versions_of",
]

_LOOK_S: Final = 0.5
_PAGE: Final = 1000
_PAGE_CHARS: Final = 4_000_000


async def queue(
    request: Request,
    member: Membership,
    *,
    agent: str,
    template: str,
    numbers: Mapping[str, float],
    kind: str,
    request_key: str | None,
    asked: Mapping[str, Any],
) -> Job:
    """Queue a training of an agent from a template of a kind, once for a key.

    asked: facts for its kind, beside those that it finds.
    Raises ApiError and AccountError, which the gateway answers for.
    """
    return await run_in_threadpool(
        job_routes.queue,
        parts_of(request),
        member,
        agent=agent,
        template=template,
        numbers=numbers,
        request_key=request_key,
        kind=kind,
        asked=asked,
    )


async def ended(request: Request, job: Job, within_s: float) -> Job:
    """Return a job once it has ended, or as it is after `within_s` seconds.

    It returns earlier when its caller has gone, or the gateway ends.
    """
    accounts, loop, ends = parts_of(request).accounts, asyncio.get_running_loop(), ending(request.scope)
    until_s = loop.time() + within_s
    while job.state.is_open and loop.time() < until_s and not ends.is_set():
        if await request.is_disconnected():
            break
        await asyncio.sleep(_LOOK_S)
        project, id_ = job.project, job.id
        job = await run_in_threadpool(
            accounts.look, lambda session, project=project, id_=id_: job_queue.get(session, project, id_)
        )
    return job


async def estimate(
    request: Request,
    member: Membership,
    *,
    agent: str,
    template: str,
    kind: str,
    numbers: Mapping[str, float],
    asked: Mapping[str, Any],
) -> Estimate:
    """Return the dry run of a training from a template of a kind; asked: see `queue`.

    It trains for some seconds, and waits for its turn before. Raises ApiError and AccountError, which the
    gateway answers for.
    """
    return await job_routes.estimated(
        request, member, agent=agent, template=template, numbers=numbers, kind=kind, asked=asked
    )


def versions_of(request: Request, member: Membership, agent: str) -> tuple[PolicyVersionRow, ...]:
    """Return the trained versions of an agent, newest first."""
    return parts_of(request).accounts.look(
        lambda session: policy_versions.read(session, member.project, agent)
    )


def version_of(request: Request, member: Membership, agent: str, label: str) -> PolicyVersionRow | None:
    """Return the trained version of an agent that has a label; None: there is none."""
    return parts_of(request).accounts.look(
        lambda session: policy_versions.find(session, member.project, agent, label)
    )


def state_folder(request: Request) -> Path:
    """Return the folder of what the gateway keeps on this machine; raises ApiError where it keeps nothing."""
    found = parts_of(request).state
    if found is None:
        raise ApiError(409, "this gateway keeps nothing on this machine")
    return found


@contextmanager
def noted(
    request: Request,
    member: Membership,
    action: str,
    subject: str,
    *,
    refusals: tuple[type[Exception], ...] = (),
    **detail: Any,
) -> Iterator[str]:
    """Have the audit say what a member asks for, before the block does it; yields how it names them.

    refusals: exceptions by which the block says that it has done nothing. detail: facts that are neither
    secrets nor a person's text.
    """
    by = member.principal.subject
    with audited(
        parts_of(request).accounts,
        by=by,
        action=action,
        project=member.project,
        subject=subject,
        refusals=refusals,
        **detail,
    ):
        yield by


def ratings_of(registry: Registry, policy: str) -> Iterator[KeptRating]:
    """Yield all ratings of `PROJECT/AGENT`, oldest first; a few megabytes are in memory at a time."""
    number = 0
    while page := registry.ratings(policy, number, _PAGE, most_chars=_PAGE_CHARS):
        yield from page
        number = page[-1].number
