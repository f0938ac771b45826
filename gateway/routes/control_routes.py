"""Control of the run of a job, and of the versions that it registered; each with its row in the audit.

The row is written before the run is asked: what a gateway that is killed in between has done is audited.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from gateway.accounts import audit
from gateway.accounts.principal import Membership
from gateway.frame.answer import answers
from gateway.frame.api_errors import ApiError
from gateway.frame.parts import parts_of
from gateway.frame.route_access import GuardedRoute, member_of
from gateway.jobs import job_queue
from gateway.jobs.steering import Action, Steering
from gateway.routes.control_answers import (
    CommandShown,
    RolledBack,
    RunVersions,
    TrafficShown,
    VersionShown,
    WantedState,
)
from gateway.routes.job_routes import dispatcher_of
from gateway.routes.steering_requests import (
    NewTraffic,
    Promotion,
    VersionNumber,
    Wanted,
    WeightsFile,
    Withdrawal,
)

router = APIRouter(route_class=GuardedRoute, tags=["control"])

Member = Annotated[Membership, Depends(member_of)]


@router.post(
    "/api/projects/{project}/jobs/{job}/control/{action}", responses=answers(WantedState | CommandShown)
)
def control(request: Request, member: Member, job: str, action: Action, body: Wanted) -> Mapping[str, Any]:
    """Tell a run what is wanted; a checkpoint, restore or flush is asked after with its `requestId`."""
    order = body.order(action)
    said = {"name": order.name} if order.name else {}
    steering = _noted(request, member, job, f"run: {action}", **said)
    return steering.order(job, order)


@router.get("/api/projects/{project}/jobs/{job}/versions", responses=answers(RunVersions))
def versions(request: Request, member: Member, job: str) -> Mapping[str, Any]:
    """Return the versions that a run has registered, with their evaluations, and its traffic."""
    return _steering(request, member, job).versions(job)


@router.get(
    "/api/projects/{project}/jobs/{job}/versions/{version}/weights",
    response_class=WeightsFile,
    responses={200: {"content": {WeightsFile.media_type: {}}}},
)
def weights(request: Request, member: Member, job: str, version: VersionNumber) -> WeightsFile:
    """Return the weights of a version as a file of safetensors."""
    steering = _noted(request, member, job, "weights read", version=version)
    return WeightsFile.of(steering.weights(job, version))


@router.post("/api/projects/{project}/jobs/{job}/promote", responses=answers(VersionShown))
def promote(request: Request, member: Member, job: str, body: Promotion) -> Mapping[str, Any]:
    """Make a version active or the canary."""
    steering = _noted(request, member, job, "promote", version=body.version, to=body.to)
    by = member.principal.subject
    return steering.promote(
        job, body.version, to=body.to, canary_share=body.canaryShare, reason=body.reason, by=by
    )


@router.post("/api/projects/{project}/jobs/{job}/rollback", responses=answers(RolledBack))
def roll_back(request: Request, member: Member, job: str, body: Withdrawal) -> Mapping[str, Any]:
    """Withdraw the canary, or the active version in favour of the one before it."""
    steering = _noted(request, member, job, "roll back", version=body.version)
    return steering.roll_back(job, body.version, reason=body.reason, by=member.principal.subject)


@router.put("/api/projects/{project}/jobs/{job}/traffic", responses=answers(TrafficShown))
def set_traffic(request: Request, member: Member, job: str, body: NewTraffic) -> Mapping[str, Any]:
    """Change which share of the clients gets which version."""
    steering = _noted(request, member, job, "traffic")
    return steering.set_traffic(job, body.change(), reason=body.reason, by=member.principal.subject)


def _noted(request: Request, member: Membership, job: str, action: str, **detail: Any) -> Steering:
    """Write into the audit what is asked for, and return what does it."""
    steering = _steering(request, member, job)
    parts_of(request).accounts.run(
        lambda session, now: audit.note(
            session,
            now,
            by=member.principal.subject,
            action=action,
            project=member.project,
            subject=f"job/{job}",
            **detail,
        )
    )
    return steering


def _steering(request: Request, member: Membership, job: str) -> Steering:
    """Return what steers a job of the project that runs, or ran, with this gateway."""
    dispatcher = dispatcher_of(request)
    found = parts_of(request).accounts.look(lambda session: job_queue.get(session, member.project, job))
    if found.place == "":
        raise ApiError(409, "the job has not begun: there is no run to be steered")
    if found.place != dispatcher.runner.place or dispatcher.steering is None:
        raise ApiError(409, "the run of this job lies with the gateway of another machine: ask that one")
    return dispatcher.steering
