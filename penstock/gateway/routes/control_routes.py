"""Control of the run of a job, and of its registered versions. Each call leaves a row in the audit.

A refused call leaves none; an order that is polled leaves one.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, BinaryIO, Final, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from penstock.gateway.accounts.principal import Membership
from penstock.gateway.frame.requests import NUMERIC, Answer, ApiError, Body, Number, Text
from penstock.gateway.frame.route_access import GuardedRoute, Member, audited, member_of, parts_of
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import Action, Order, Steering, VersionFile
from penstock.gateway.routes.job_routes import dispatcher_of

# ---- Bodies of requests.

Reason = Annotated[Text, Field(max_length=500)]
Share = Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]
Version = (
    Annotated[int, Field(strict=True, ge=1, lt=2**53)]
    | Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,62}$")]
)
"""A version by its number, or by its name, such as `v15`."""
VersionNumber = Annotated[int, Path(ge=1, lt=2**53)]


_PIECE_BYTES: Final = 1024 * 1024


class WeightsFile(StreamingResponse):
    """The weights of a version as a file, for a browser to download."""

    media_type = "application/octet-stream"

    @classmethod
    def of(cls, file: VersionFile) -> "WeightsFile":
        name = re.sub(r"[^A-Za-z0-9._-]", "-", file.name)
        length = os.fstat(file.content.fileno()).st_size
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(length)}
        return cls(_pieces(file.content), headers=headers)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


class Wanted(Body):
    """An order for a run.

    name: of a checkpoint, for `checkpoint` and `restore`. minSteps: for `flush`. requestId: of an earlier
    answer, to poll the same order.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    minSteps: Annotated[int, Field(ge=1, lt=2**53), NUMERIC] = 1  # noqa: N815 - as all names of the API
    requestId: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None  # noqa: N815
    reason: Reason = ""

    def order(self, action: Action) -> Order:
        """Return the order for a run; raises ApiError 422 if a restore has no name."""
        if action is Action.RESTORE and self.name is None:
            raise ApiError(422, "name: say which checkpoint to restore", field="name")
        return Order(
            action=action,
            name=self.name or "",
            min_steps=self.minSteps,
            request_id=self.requestId or secrets.token_hex(8),
            reason=self.reason,
        )


class Promotion(Body):
    """A version to promote, and the reason."""

    version: Version
    to: Literal["active", "canary"] = "active"
    canaryShare: Share | None = None  # noqa: N815
    reason: Annotated[Reason, Field(min_length=1)]


class Withdrawal(Body):
    """A version to withdraw, and the reason; default: the canary, else the active version."""

    version: Version | None = None
    reason: Annotated[Reason, Field(min_length=1)]


class NewTraffic(Body):
    """Changes of the traffic of versions, and the reason; omitted fields stay. shadow 0: none."""

    canaryShare: Share | None = None  # noqa: N815
    latestShare: Share | None = None  # noqa: N815
    shadow: Annotated[int, Field(ge=0, lt=2**53), NUMERIC] | None = None
    reason: Annotated[Reason, Field(min_length=1)]

    def change(self) -> dict[str, Any]:
        return {"canary_share": self.canaryShare, "latest_share": self.latestShare, "shadow": self.shadow}


# ---- Answers about runs and their versions, as the document describes them.


class WantedState(Answer):
    """The desired state of a run. revision: rises with each order."""

    desired: str
    revision: int


class CommandShown(Answer):
    """Progress of a checkpoint, restore or flush. Its 64-bit numbers are text."""

    number: str
    request_id: str
    action: str
    state: str
    refusal: str
    detail: str
    checkpoint_id: str
    version: str
    steps: str


class EvaluationShown(Answer):
    """Mean and standard deviation of the return over evaluation episodes."""

    mean: float
    std: float
    episodes: int


class VersionShown(Answer):
    """A registered version. pinned: its weights are held. standby: a rollback makes it active again."""

    policy: str
    version: int
    run: str
    update: int
    sha256: str
    size_bytes: int
    configuration: str
    origin: str
    parent: int | None
    evaluation: EvaluationShown | None
    reason: str
    place: str
    status: Literal["candidate", "canary", "active", "retired", "rolled_back"]
    standby: bool
    created: str
    changed: str
    pinned: bool


class ListedVersion(VersionShown):
    """A registered version with its name, null where it has none."""

    label: str | None


class TrafficShown(Answer):
    """The share of the clients of each version. pins: version of clients that always get the same one."""

    policy: str
    revision: int
    experiment: str
    canary_share: float
    latest_share: float
    shadow: int | None
    pins: dict[str, int]
    changed: str | None


class RunVersions(Answer):
    """The versions that a run has registered, and the traffic; null before the first."""

    versions: list[ListedVersion]
    traffic: TrafficShown | None


class RolledBack(Answer):
    """The withdrawn version and the active one. awaits_number: the active content has no own number yet."""

    withdrawn: VersionShown
    active: VersionShown | None
    awaits_number: bool


_ANSWERED_LATER: Final = {Action.CHECKPOINT, Action.RESTORE, Action.FLUSH}

Steered = Callable[..., AbstractContextManager[tuple[Steering, str]]]
"""Yields the steering of a job, and the subject of the caller, for one call.

Arguments: the request, the job, the action, and facts for the audit.
"""


def steering_routes(path: str, steered: Steered) -> APIRouter:
    """Return the routes that steer a run and decide about its versions. path: of a run, with `{job}`."""
    routes = APIRouter(route_class=GuardedRoute, tags=["control"])

    @routes.post(f"{path}/control/{{action}}", response_model=WantedState | CommandShown)
    def control(request: Request, job: str, action: Action, body: Wanted) -> Mapping[str, Any]:
        """Give an order to a run; poll a checkpoint, restore or flush with its `requestId`."""
        order = body.order(action)
        facts = {"name": order.name} if order.name else {}
        again = _asked_again(order)
        with steered(request, job, f"run: {action}", request_id=again, **facts) as (steering, _):
            return steering.order(job, order)

    @routes.get(
        f"{path}/versions/{{version}}/weights",
        response_class=WeightsFile,
        responses={200: {"content": {WeightsFile.media_type: {}}}},
    )
    def weights(request: Request, job: str, version: VersionNumber) -> WeightsFile:
        """Return the weights of a version as a file of safetensors."""
        with steered(request, job, "weights read", version=version) as (steering, _):
            return WeightsFile.of(steering.weights(job, version))

    @routes.post(f"{path}/promote", response_model=VersionShown)
    def promote(request: Request, job: str, body: Promotion) -> Mapping[str, Any]:
        """Make a version active or the canary."""
        facts = {"version": body.version, "to": body.to}
        with steered(request, job, "promote", **facts) as (steering, by):
            share = body.canaryShare
            return steering.promote(
                job, body.version, to=body.to, canary_share=share, reason=body.reason, by=by
            )

    @routes.post(f"{path}/rollback", response_model=RolledBack)
    def roll_back(request: Request, job: str, body: Withdrawal) -> Mapping[str, Any]:
        """Withdraw the canary, or the active version in favour of the one before it."""
        with steered(request, job, "roll back", version=body.version) as (steering, by):
            return steering.roll_back(job, body.version, reason=body.reason, by=by)

    @routes.put(f"{path}/traffic", response_model=TrafficShown)
    def set_traffic(request: Request, job: str, body: NewTraffic) -> Mapping[str, Any]:
        """Change which share of the clients gets which version."""
        with steered(request, job, "traffic") as (steering, by):
            return steering.set_traffic(job, **body.change(), reason=body.reason, by=by)

    return routes


def _asked_again(order: Order) -> str | None:
    """Return the id by which an order is polled; None for an order that is answered at once."""
    return order.request_id if order.action in _ANSWERED_LATER else None


# ---- The routes of the gateway.


@contextmanager
def _audited(
    request: Request, job: str, action: str, *, request_id: str | None = None, **detail: Any
) -> Iterator[tuple[Steering, str]]:
    """Audit a call of a member, and yield the steering of the job and the subject of the member."""
    member = member_of(request)
    steering = _steering(request, member, job)
    with audited(parts_of(request), member, action, f"job/{job}", request=request_id, **detail):
        yield steering, member.principal.subject


def _steering(request: Request, member: Membership, job: str) -> Steering:
    """Return the steering of a job of the project that runs, or ran, with this gateway."""
    dispatcher = dispatcher_of(request)
    found = parts_of(request).accounts.look(lambda session: job_queue.get(session, member.project, job))
    if found.place == "":
        raise ApiError(409, "the job has not begun: there is no run to be steered")
    steering = dispatcher.steering_of(found)
    if steering is None:
        raise ApiError(409, "the run of this job lies with the gateway of another machine: ask that one")
    return steering


_JOB: Final = "/api/projects/{project}/jobs/{job}"
router = steering_routes(_JOB, _audited)


@router.get(f"{_JOB}/versions", response_model=RunVersions)
def versions(request: Request, member: Member, job: str) -> Mapping[str, Any]:
    """Return the versions that a run has registered, with their evaluations, and its traffic."""
    return _steering(request, member, job).versions(job)
