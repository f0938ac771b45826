"""Which caller may call which route: the one table, the routes that keep to it, and the audit of calls.

A route that is not in the table is refused when the application is made, and so is a line without its route.
The caller is known, and their role looked up, before anything of the body is read.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.accounts.oidc import OidcSignIn
from penstock.gateway.accounts.principal import (
    AccountError,
    Forbidden,
    Membership,
    Principal,
    Unauthenticated,
)
from penstock.gateway.frame.api_errors import ApiError, CallLimits
from penstock.gateway.jobs.job_dispatcher import JobDispatcher
from penstock.gateway.jobs.job_records import CannotSteer, NoAnswer
from penstock.gateway.store.tables import Role
from penstock.registry.records import RegistryError, Unavailable
from penstock.registry.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one gateway, made when it starts.

    dispatcher: None where it runs no jobs. state: folder of what it keeps on this machine; None where it
    keeps nothing. oidc: None where no provider of identities is set up. quotas: of each project.
    """

    accounts: Accounts
    registry: Registry
    limits: CallLimits
    dispatcher: JobDispatcher | None = None
    state: Path | None = None
    oidc: OidcSignIn | None = None
    quotas: Quotas = field(default_factory=Quotas)


def parts_of(request: Request) -> Parts:
    found: Parts = request.app.state.parts
    return found


def accounts_of(request: Request) -> Accounts:
    found: Accounts = request.app.state.accounts
    return found


def state_folder(request: Request) -> Path:
    """Return the folder of what the gateway keeps on this machine; raises ApiError where it keeps nothing."""
    found = parts_of(request).state
    if found is None:
        raise ApiError(409, "this gateway keeps nothing on this machine")
    return found


def address_of(request: Request) -> str:
    """Return the address that a request came from, "" where it is not known."""
    return request.client.host if request.client is not None else ""


PROJECT_HEADER: Final = "Penstock-Project"


class Access(StrEnum):
    """Who may call a route: anybody, who has signed in, or a member of the project in this role or above.

    Of a route without `{project}` in its path, the project is the token's, or the one that the header
    `Penstock-Project` names, or the only one that a person belongs to.
    """

    ANYBODY = "anybody"
    KNOWN = "known"
    VIEWER = "viewer"
    EDITOR = "editor"
    OWNER = "owner"


Table = Mapping[tuple[str, str], Access]

ACCESS: Final[Table] = {
    ("GET", "/"): Access.ANYBODY,
    ("GET", "/link"): Access.ANYBODY,
    ("GET", "/console/{file}"): Access.ANYBODY,
    ("GET", "/api/health"): Access.ANYBODY,
    ("GET", "/api/openapi.json"): Access.ANYBODY,
    ("POST", "/api/auth/token"): Access.ANYBODY,
    ("POST", "/api/auth/sign-up"): Access.ANYBODY,
    ("GET", "/api/auth/oidc"): Access.ANYBODY,
    ("POST", "/api/auth/oidc"): Access.ANYBODY,
    ("GET", "/api/auth/oidc/callback"): Access.ANYBODY,
    ("POST", "/api/auth/oidc/session"): Access.ANYBODY,
    ("POST", "/api/auth/sign-out"): Access.KNOWN,
    ("POST", "/api/auth/password"): Access.KNOWN,
    ("POST", "/api/auth/join"): Access.KNOWN,
    ("GET", "/api/me"): Access.KNOWN,
    ("GET", "/api/projects/{project}"): Access.VIEWER,
    ("GET", "/api/projects/{project}/members"): Access.VIEWER,
    ("PUT", "/api/projects/{project}/members/{user}"): Access.OWNER,
    ("DELETE", "/api/projects/{project}/members/{user}"): Access.OWNER,
    ("POST", "/api/projects/{project}/invitations"): Access.OWNER,
    ("GET", "/api/projects/{project}/tokens"): Access.OWNER,
    ("POST", "/api/projects/{project}/tokens"): Access.OWNER,
    ("DELETE", "/api/projects/{project}/tokens/{token}"): Access.OWNER,
    ("GET", "/api/projects/{project}/audit"): Access.OWNER,
    ("POST", "/api/policies/feedback/{agent_id}"): Access.EDITOR,
    ("GET", "/api/projects/{project}/agents/{agent_id}/feedback"): Access.VIEWER,
    ("POST", "/api/projects/{project}/agents/{agent_id}/feedback"): Access.EDITOR,
    ("POST", "/api/projects/{project}/agents/{agent_id}/pairs"): Access.EDITOR,
    ("GET", "/api/projects/{project}/agents/{agent_id}/late-rewards"): Access.VIEWER,
    ("POST", "/api/projects/{project}/agents/{agent_id}/late-rewards"): Access.EDITOR,
    ("DELETE", "/api/projects/{project}/raters/{rater}"): Access.OWNER,
    ("POST", "/api/projects/{project}/agents/{agent_id}/conversations"): Access.EDITOR,
    ("GET", "/api/projects/{project}/agents/{agent_id}/satisfaction"): Access.VIEWER,
    ("GET", "/api/projects/{project}/agents/{agent_id}/links"): Access.EDITOR,
    ("POST", "/api/projects/{project}/agents/{agent_id}/links"): Access.EDITOR,
    ("DELETE", "/api/projects/{project}/links/{link}"): Access.EDITOR,
    ("GET", "/api/link"): Access.ANYBODY,
    ("GET", "/api/projects/{project}/templates"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs"): Access.VIEWER,
    ("POST", "/api/projects/{project}/jobs"): Access.EDITOR,
    ("GET", "/api/projects/{project}/jobs/{job}"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs/{job}/log"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs/{job}/curve"): Access.VIEWER,
    ("POST", "/api/projects/{project}/estimates"): Access.EDITOR,
    ("GET", "/api/projects/{project}/events"): Access.VIEWER,
    ("POST", "/api/projects/{project}/jobs/{job}/cancel"): Access.EDITOR,
    ("POST", "/api/projects/{project}/jobs/{job}/control/{action}"): Access.EDITOR,
    ("GET", "/api/projects/{project}/jobs/{job}/versions"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs/{job}/versions/{version}/weights"): Access.EDITOR,
    ("POST", "/api/projects/{project}/jobs/{job}/promote"): Access.EDITOR,
    ("POST", "/api/projects/{project}/jobs/{job}/rollback"): Access.EDITOR,
    ("PUT", "/api/projects/{project}/jobs/{job}/traffic"): Access.EDITOR,
    ("POST", "/api/link/ratings"): Access.ANYBODY,
    ("DELETE", "/api/me/feedback"): Access.KNOWN,
}
"""Of the gateway's own routes; a workload adds those of its own."""


class GuardedRoute(APIRoute):
    """A route whose caller is checked before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, path = super().get_route_handler(), self.path_format

        async def guarded(request: Request) -> Response:
            await _admit(request, path)
            return await handle(request)

        return guarded


def add_routes(app: FastAPI, routers: Sequence[APIRouter], table: Table) -> None:
    """Add the routes of the routers, and their lines of the table.

    Raises ValueError unless the table has every route of the routers, and no other.
    """
    routes = [route for router in routers for route in router.routes]
    loose = [str(getattr(route, "path", route)) for route in routes if not isinstance(route, GuardedRoute)]
    if loose:
        raise ValueError(f"routes {loose}: they are no GuardedRoute, so that no rule says who may call them")
    found = {(method, route.path) for route in guarded(routes) for method in route.methods or ()}
    if found != table.keys():
        missing, spare = sorted(found - table.keys()), sorted(table.keys() - found)
        raise ValueError(f"the table of access lacks {missing} and has {spare} without a route")
    app.router.routes.extend(routes)
    app.state.access.update(table)


def guarded(routes: Sequence[BaseRoute]) -> list[GuardedRoute]:
    return [route for route in routes if isinstance(route, GuardedRoute)]


async def _admit(request: Request, path: str) -> None:
    """Find out who calls and whether they may; raises an AccountError."""
    access = request.app.state.access[request.method, path]
    parts = parts_of(request)
    if access is Access.ANYBODY:
        return
    header = request.headers.get("authorization")
    if header is None:
        raise Unauthenticated("send a token: `Authorization: Bearer TOKEN`, or Basic with it as password")
    principal = await run_in_threadpool(parts.accounts.authenticate, header)
    request.state.principal = principal
    parts.limits.admit(principal.subject)
    if access is Access.KNOWN:
        return
    member = await run_in_threadpool(_member, request, principal)
    if not member.role.includes(Role(access)):
        raise Forbidden(f"your role in this project is {member.role}, this needs {access}")
    request.state.member = member


def _member(request: Request, principal: Principal) -> Membership:
    """Return what the caller is in the project that the request is about."""
    accounts = parts_of(request).accounts
    named = request.path_params.get("project") or request.headers.get(PROJECT_HEADER) or principal.project
    if named is not None:
        return accounts.membership(principal, str(named))
    belongs = accounts.projects_of(principal)
    if len(belongs) != 1:
        raise Forbidden(f"you belong to {len(belongs)} projects: name one in the header {PROJECT_HEADER}")
    return belongs[0]


def principal_of(request: Request) -> Principal:
    """Return who calls; of a route whose access is at least KNOWN."""
    found: Principal = request.state.principal
    return found


def member_of(request: Request) -> Membership:
    """Return what the caller is in the project; of a route whose access names a role."""
    found: Membership = request.state.member
    return found


Member = Annotated[Membership, Depends(member_of)]


# ---- The audit of what is done outside the accounts' database.

_REFUSALS: Final = (AccountError, CannotSteer, RegistryError)
_UNKNOWN: Final = (NoAnswer, Unavailable)


@contextmanager
def audited(
    parts: Parts,
    member: Membership,
    action: str,
    subject: str,
    *,
    request: str | None = None,
    refusals: tuple[type[Exception], ...] = (),
    **detail: Any,
) -> Iterator[None]:
    """Have the audit say what a member asks for, before the block does it.

    What the block does lies outside the accounts' database: in a registry, a run, a file. The row is written
    before, so that what a gateway does that is killed in between is audited. It is taken back where the block
    refuses, since nothing was done; where no answer comes it stays, since it may have been done.

    request: an id under which the same is asked for again, to hear how far it has come: one row for all.
    refusals: exceptions by which the block says that it has done nothing, beside those of accounts, runs and
    registries. detail: facts that are neither secrets nor a person's text.
    """
    accounts, project, by = parts.accounts, member.project, member.principal.subject
    said = detail if request is None else detail | {"request": request}

    def write(session: Session, now: datetime) -> int | None:
        if request is not None and audit.is_noted(
            session, project=project, action=action, subject=subject, request=request
        ):
            return None
        row = audit.note(session, now, by=by, action=action, project=project, subject=subject, **said)
        session.flush()
        return row.number

    number = accounts.run(write)
    known: tuple[type[Exception], ...] = (*_REFUSALS, *refusals)
    try:
        yield
    except known as error:
        if number is not None and not isinstance(error, _UNKNOWN):
            accounts.run(lambda session, _: audit.take_back(session, number))
        raise
