"""Control of the run of a job, and of the versions that it registered; each with its row in the audit.

The row is written before the run is asked: what a gateway that is killed in between has done is audited.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from gateway.accounts import audit
from gateway.accounts.principal import Membership
from gateway.frame.api_errors import ApiError
from gateway.frame.parts import parts_of
from gateway.frame.route_access import GuardedRoute, member_of
from gateway.jobs import job_queue
from gateway.jobs.steering import Action, Order, Steering, TrafficChange
from gateway.routes.job_routes import desk_of
from gateway.routes.request_text import Body, Text

router = APIRouter(route_class=GuardedRoute, tags=["control"])

Member = Annotated[Membership, Depends(member_of)]
Reason = Annotated[Text, Field(max_length=500)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Version = Annotated[int, Field(ge=1, lt=2**53)]


class Wanted(Body):
    """What is wanted of a run.

    name: of a checkpoint, for `checkpoint` and `restore`. minSteps: for `flush`. requestId: of the answer of
    an order that is asked after.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    minSteps: Annotated[int, Field(ge=1, lt=2**53)] = 1  # noqa: N815 - as all names of the API
    requestId: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None  # noqa: N815
    reason: Reason = ""


class Promotion(Body):
    """A version that more clients shall get, and why."""

    version: Version
    to: Literal["active", "canary"] = "active"
    canaryShare: Share | None = None  # noqa: N815
    reason: Annotated[Reason, Field(min_length=1)]


class Withdrawal(Body):
    """A version that no client shall get any more, and why; left out: the canary, else the active one."""

    version: Version | None = None
    reason: Annotated[Reason, Field(min_length=1)]


class NewTraffic(Body):
    """Which clients get which version, and why; what is left out stays. shadow 0: none."""

    canaryShare: Share | None = None  # noqa: N815
    latestShare: Share | None = None  # noqa: N815
    shadow: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    reason: Annotated[Reason, Field(min_length=1)]


@router.post("/api/projects/{project}/jobs/{job}/control/{action}")
def control(request: Request, member: Member, job: str, action: Action, body: Wanted) -> Mapping[str, Any]:
    """Tell a run what is wanted; a checkpoint, restore or flush is asked after with its `requestId`."""
    if action is Action.RESTORE and body.name is None:
        raise ApiError(422, "name: say which checkpoint shall be restored", field="name")
    order = Order(
        action=action,
        name=body.name or "",
        min_steps=body.minSteps,
        request_id=body.requestId or secrets.token_hex(8),
        reason=body.reason,
    )
    said = {"name": order.name} if order.name else {}
    steering = _noted(request, member, job, f"run: {action}", **said)
    return steering.order(job, order)


@router.get("/api/projects/{project}/jobs/{job}/versions")
def versions(request: Request, member: Member, job: str) -> Mapping[str, Any]:
    """Return the versions that a run has registered, with their evaluations, and its traffic."""
    return _steering(request, member, job).versions(job)


@router.post("/api/projects/{project}/jobs/{job}/promote")
def promote(request: Request, member: Member, job: str, body: Promotion) -> Mapping[str, Any]:
    """Make a version active or the canary."""
    steering = _noted(request, member, job, "promote", version=body.version, to=body.to)
    by = member.principal.subject
    return steering.promote(
        job, body.version, to=body.to, canary_share=body.canaryShare, reason=body.reason, by=by
    )


@router.post("/api/projects/{project}/jobs/{job}/rollback")
def roll_back(request: Request, member: Member, job: str, body: Withdrawal) -> Mapping[str, Any]:
    """Withdraw the canary, or the active version in favour of the one before it."""
    steering = _noted(request, member, job, "roll back", version=body.version)
    return steering.roll_back(job, body.version, reason=body.reason, by=member.principal.subject)


@router.put("/api/projects/{project}/jobs/{job}/traffic")
def set_traffic(request: Request, member: Member, job: str, body: NewTraffic) -> Mapping[str, Any]:
    """Change which share of the clients gets which version."""
    steering = _noted(request, member, job, "traffic")
    change = TrafficChange(canary_share=body.canaryShare, latest_share=body.latestShare, shadow=body.shadow)
    return steering.set_traffic(job, change, reason=body.reason, by=member.principal.subject)


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
    desk = desk_of(request)
    found = parts_of(request).accounts.look(lambda session: job_queue.get(session, member.project, job))
    if found.place == "":
        raise ApiError(409, "the job has not begun: there is no run to be steered")
    if found.place != desk.runner.place or desk.steering is None:
        raise ApiError(409, "the run of this job lies with the gateway of another machine: ask that one")
    return desk.steering
