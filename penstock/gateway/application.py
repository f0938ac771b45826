"""Listeners: of a gateway with accounts and the routes of workloads, and of one workload over a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Form, Request
from pydantic import SecretStr

from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.requests import ApiError, CallLimits
from penstock.gateway.frame.route_access import (
    ACCESS,
    GuardedRoute,
    Listener,
    Member,
    Parts,
    Table,
    TokenDoor,
    accounts_of,
    address_of,
    open_door,
    table,
)
from penstock.gateway.jobs.job_records import JobKind
from penstock.gateway.jobs.live_jobs import LiveJobs
from penstock.gateway.routes import (
    account_routes,
    console_routes,
    control_routes,
    feedback_links,
    feedback_routes,
    job_routes,
    project_routes,
    satisfaction_routes,
)
from penstock.gateway.upstream import Loop, Upstream
from penstock.protocol.limits import MIB
from penstock.rpc.gate import Rates

OWN: Final = (
    account_routes.router,
    console_routes.console,
    project_routes.router,
    feedback_routes.router,
    feedback_links.router,
    satisfaction_routes.router,
    job_routes.router,
    control_routes.router,
    console_routes.description,
)
SITE_RATES: Final = Rates(calls=5000.0, bytes=512.0 * MIB, settings="per address")
"""Rates of an address, and of an account, at a site: enough for a program that acts in a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The HTTP API of a workload: part of a gateway, or served over a run at its own address.

    router: its routes, each a `GuardedRoute`. access: to each of them. kinds: of jobs, by name in templates.

    Over a run: title: of the OpenAPI document. recipe: file of the run that is trained if none is named.
    settings: `SECTION.KEY=VALUE`, applied over the recipe, also on resume. life: lifespan, which is given the
    run. loop: learns from feedback. takes_agents: whether it can serve several runs. page: path of the page
    for people; "": none.
    """

    router: APIRouter
    access: Table
    kinds: Mapping[str, JobKind] = field(default_factory=dict)
    title: str = ""
    recipe: Path = Path()
    settings: tuple[str, ...] = ()
    life: Callable[[Upstream, FastAPI], AbstractAsyncContextManager[None]] | None = None
    loop: Loop | None = None
    takes_agents: bool = False
    page: str = ""


def gateway_listener(parts: Parts, doors: Doors, services: Sequence[Service] = ()) -> Listener:
    """Return the listener of a gateway with accounts. services: of workloads."""
    access = dict(ACCESS)
    for one in services:
        access |= one.access
    return Listener(
        title="Penstock",
        routers=[*OWN, *(one.router for one in services)],
        access=access,
        admit=parts.limits.admit_address,
        door=TokenDoor(accounts=parts.accounts, limits=parts.limits),
        doors=doors,
        state={
            "parts": parts,
            "accounts": parts.accounts,
            "live": LiveJobs(parts.accounts, parts.dispatcher),
        },
    )


def site_listener(
    service: Service,
    upstream: Upstream,
    doors: Doors,
    accounts: Accounts | None = None,
    project: str = "",
) -> Listener:
    """Return the listener of a service over a run.

    accounts: those that issue the tokens of `project`; None: no token is required.
    """
    assert service.life is not None
    limits = CallLimits(address=SITE_RATES, account=SITE_RATES)
    listener = Listener(
        title=service.title,
        routers=[service.router],
        access=service.access,
        admit=limits.admit_address,
        door=open_door,
        doors=replace(doors, large=frozenset()),
        life=partial(service.life, upstream),
    )
    if accounts is None:
        return listener
    return replace(
        listener,
        routers=[service.router, _sign_in],
        access={**service.access, **_SIGN_IN},
        door=TokenDoor(accounts=accounts, limits=limits, project=project),
        state={"accounts": accounts},
    )


# ---- Signing in at a site that other machines reach, at the paths of the gateway.

_NONE: Final = SecretStr("")
_SIGN_IN: Final = table(
    anybody=["POST /api/auth/token", "POST /api/auth/sign-up"],
    viewer=["POST /api/auth/sign-out", "GET /api/me"],
)
_sign_in = APIRouter(route_class=GuardedRoute, tags=["accounts"])
_sign_in.post("/api/auth/sign-up", status_code=201)(account_routes.sign_up)
_sign_in.post("/api/auth/sign-out", status_code=204)(account_routes.sign_out)


@_sign_in.post("/api/auth/token")
def token(
    request: Request,
    grant_type: Annotated[str, Form(max_length=32)],
    username: Annotated[str, Form(max_length=128)] = "",
    password: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
    refresh_token: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
) -> dict[str, Any]:
    """Issue an access token for a password or a refresh token."""
    accounts = accounts_of(request)
    if grant_type == "password":
        grant = accounts.sign_in(username, password.get_secret_value(), address=address_of(request))
    elif grant_type == "refresh_token":
        grant = accounts.refresh(refresh_token.get_secret_value())
    else:
        raise ApiError(
            400, "use password or refresh_token", field="grant_type", error="unsupported_grant_type"
        )
    return account_routes.shown_grant(grant)


@_sign_in.get("/api/me")
def me(member: Member) -> dict[str, str]:
    """Return the caller, and their role in the project."""
    return {"name": member.principal.name, "project": member.project, "role": member.role.value}
