"""Access control: the table of access, the routes that enforce it, and the audit of calls.

Making an application fails for a route that the table lacks, and for a row of the table without a route. The
caller is authenticated and authorized before any of the body is read.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from penstock import __version__
from penstock.gateway.accounts import audit
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.accounts.principal import (
    AccountError,
    Forbidden,
    Membership,
    NoSuchThing,
    Principal,
    Unauthenticated,
)
from penstock.gateway.frame.envelope import Doors, Envelope
from penstock.gateway.frame.requests import EXPECTED, ApiError, CallLimits, refusal_of
from penstock.gateway.jobs.job_records import CannotSteer, NoAnswer
from penstock.gateway.store.tables import Role
from penstock.registry.records import Busy, RegistryError, Unavailable
from penstock.registry.registry import Registry
from penstock.rpc.address import counted_as

if TYPE_CHECKING:  # they load what hashes passwords and signs tokens, which `penstock ui` does without
    from penstock.gateway.accounts.accounts import Accounts
    from penstock.gateway.accounts.oidc import OidcSignIn
    from penstock.gateway.jobs.job_dispatcher import JobDispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one gateway, made when it starts.

    dispatcher: None where it runs no jobs. state: folder of what it keeps on this machine; None where it
    keeps nothing. oidc: None where no provider of identities is set up. quotas: of each project.
    """

    accounts: "Accounts"
    registry: Registry
    limits: CallLimits
    dispatcher: "JobDispatcher | None" = None
    state: Path | None = None
    oidc: "OidcSignIn | None" = None
    quotas: Quotas = field(default_factory=Quotas)


def parts_of(request: Request) -> Parts:
    found: Parts = request.app.state.parts
    return found


def accounts_of(request: Request) -> "Accounts":
    found: Accounts = request.app.state.accounts
    return found


def state_folder(request: Request) -> Path:
    """Return the folder of what the gateway keeps on this machine; raises ApiError where it keeps nothing."""
    found = parts_of(request).state
    if found is None:
        raise ApiError(409, "this gateway keeps nothing on this machine")
    return found


def address_of(request: Request) -> str:
    """Return what limits count the address of a request as, "" where it is not known."""
    return counted_as(request.client.host) if request.client is not None else ""


PROJECT_HEADER: Final = "Penstock-Project"


class Access(StrEnum):
    """Access to a route: for anybody, for signed-in callers, or for project members of at least this role.

    Where the path has no `{project}`, the project is the one of the API token, or the one that the header
    `Penstock-Project` names, or the only project of the person.
    """

    ANYBODY = "anybody"
    KNOWN = "known"
    VIEWER = "viewer"
    EDITOR = "editor"
    OWNER = "owner"


Table = Mapping[tuple[str, str], Access]


def table(**routes: Sequence[str]) -> Table:
    """Return a table of routes such as `GET /health`, by the access that they have, in small letters."""
    return {
        (one.split(" ")[0], one.split(" ")[1]): Access(name) for name, some in routes.items() for one in some
    }


ACCESS: Final = table(
    anybody=[
        "GET /",
        "GET /link",
        "GET /console/{file}",
        "GET /api/health",
        "GET /api/openapi.json",
        "POST /api/auth/token",
        "POST /api/auth/sign-up",
        "GET /api/auth/oidc",
        "POST /api/auth/oidc",
        "GET /api/auth/oidc/callback",
        "POST /api/auth/oidc/session",
        "GET /api/link",
        "POST /api/link/ratings",
    ],
    known=[
        "POST /api/auth/sign-out",
        "POST /api/auth/password",
        "POST /api/auth/join",
        "GET /api/me",
        "DELETE /api/me/feedback",
    ],
    viewer=[
        "GET /api/projects/{project}",
        "GET /api/projects/{project}/members",
        "GET /api/projects/{project}/agents/{agent_id}/feedback",
        "GET /api/projects/{project}/agents/{agent_id}/late-rewards",
        "GET /api/projects/{project}/agents/{agent_id}/satisfaction",
        "GET /api/projects/{project}/templates",
        "GET /api/projects/{project}/jobs",
        "GET /api/projects/{project}/jobs/{job}",
        "GET /api/projects/{project}/jobs/{job}/log",
        "GET /api/projects/{project}/jobs/{job}/curve",
        "GET /api/projects/{project}/events",
        "GET /api/projects/{project}/jobs/{job}/versions",
    ],
    editor=[
        "POST /api/policies/feedback/{agent_id}",
        "POST /api/projects/{project}/agents/{agent_id}/feedback",
        "POST /api/projects/{project}/agents/{agent_id}/pairs",
        "POST /api/projects/{project}/agents/{agent_id}/late-rewards",
        "POST /api/projects/{project}/agents/{agent_id}/conversations",
        "GET /api/projects/{project}/agents/{agent_id}/links",
        "POST /api/projects/{project}/agents/{agent_id}/links",
        "DELETE /api/projects/{project}/links/{link}",
        "POST /api/projects/{project}/jobs",
        "POST /api/projects/{project}/estimates",
        "POST /api/projects/{project}/jobs/{job}/cancel",
        "POST /api/projects/{project}/jobs/{job}/control/{action}",
        "GET /api/projects/{project}/jobs/{job}/versions/{version}/weights",
        "POST /api/projects/{project}/jobs/{job}/promote",
        "POST /api/projects/{project}/jobs/{job}/rollback",
        "PUT /api/projects/{project}/jobs/{job}/traffic",
    ],
    owner=[
        "PUT /api/projects/{project}/members/{user}",
        "DELETE /api/projects/{project}/members/{user}",
        "POST /api/projects/{project}/invitations",
        "GET /api/projects/{project}/tokens",
        "POST /api/projects/{project}/tokens",
        "DELETE /api/projects/{project}/tokens/{token}",
        "GET /api/projects/{project}/audit",
        "DELETE /api/projects/{project}/raters/{rater}",
    ],
)
"""Access to the routes of the gateway itself; workloads have tables for theirs."""


# ---- The check of callers (door) of a listener, the routes that it guards, and the application.

Door = Callable[[Request, Access], Awaitable[Response | None]]
"""Checks the caller of a route: returns an answer to send instead, or None; raises ApiError, AccountError."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


async def open_door(_request: Request, _access: Access) -> None:
    """Admit every caller as an owner, for a listener on loopback without accounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDoor:
    """Admits callers with a valid token. project: of which they must be members; "": the request names it."""

    accounts: "Accounts"
    limits: CallLimits
    project: str = ""

    async def __call__(self, request: Request, access: Access) -> None:
        """Authenticate and authorize the caller; raises AccountError."""
        if access is Access.ANYBODY:
            return
        header = request.headers.get("authorization")
        if header is None:
            raise Unauthenticated(
                "sign in, or send a token of the project: `Authorization: Bearer TOKEN`"
                if self.project
                else "send a token: `Authorization: Bearer TOKEN`, or Basic with it as password"
            )
        principal = await run_in_threadpool(self.accounts.authenticate, header)
        request.state.principal = principal
        self.limits.admit(principal.subject)
        if access is Access.KNOWN:
            return
        member = await run_in_threadpool(self._member, request, principal)
        if not member.role.includes(Role(access)):
            raise Forbidden(f"your role in this project is {member.role}, this needs {access}")
        request.state.member = member

    def _member(self, request: Request, principal: Principal) -> Membership:
        """Return the membership of the caller in the project of the request."""
        if self.project:
            try:
                return self.accounts.membership(principal, self.project)
            except (Forbidden, NoSuchThing) as error:
                raise Forbidden("you are no member of this project") from error
        named = request.path_params.get("project") or request.headers.get(PROJECT_HEADER) or principal.project
        if named is not None:
            return self.accounts.membership(principal, str(named))
        belongs = self.accounts.projects_of(principal)
        if len(belongs) != 1:
            raise Forbidden(f"you belong to {len(belongs)} projects: name one in the header {PROJECT_HEADER}")
        return belongs[0]


class GuardedRoute(APIRoute):
    """A route whose caller is checked before its body is read."""

    is_json_alone = False

    def get_route_handler(self) -> Handler:
        handle, path, is_json_alone = self.inner_handler(), self.path_format, self.is_json_alone

        async def guarded(request: Request) -> Response:
            state = request.app.state
            answer: Response | None = await state.door(request, state.access[request.method, path])
            if answer is not None:
                return answer
            if is_json_alone and request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(415, "content-type: send application/json")
            return await handle(request)

        return guarded

    def inner_handler(self) -> Handler:
        """Return the handler of requests whose caller was admitted."""
        return super().get_route_handler()


class JsonRoute(GuardedRoute):
    """A guarded route that refuses POST bodies of other types than JSON."""

    is_json_alone = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """What is served at one address.

    access: to each route of the routers. admit: counts a request of a client address; raises ApiError beyond
    the rate limit. door: check of callers. state: attributes of `app.state`. form: makes the answer to a
    request that is refused before its route is found. errors: further exception handlers. life: lifespan of
    the application.
    """

    title: str
    routers: Sequence[APIRouter]
    access: Table
    admit: Callable[[str], None]
    door: Door = open_door
    doors: Doors = field(default_factory=Doors)
    state: Mapping[str, Any] = field(default_factory=dict)
    form: Callable[[ApiError], Response] = ApiError.response
    errors: Mapping[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = field(
        default_factory=dict
    )
    life: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None


def make_app(listener: Listener) -> FastAPI:
    """Return the application of a listener, without the documentation pages of FastAPI.

    Raises ValueError unless the table of access has exactly the routes of the routers.
    """
    app = FastAPI(
        title=listener.title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=listener.life,
    )
    routes = [route for router in listener.routers for route in router.routes]
    guarded = [route for route in routes if isinstance(route, GuardedRoute)]
    if loose := [str(getattr(route, "path", route)) for route in routes if route not in guarded]:
        raise ValueError(f"routes {loose}: no GuardedRoute, so no rule of access applies to them")
    found = {(method, route.path) for route in guarded for method in route.methods or ()}
    if found != listener.access.keys():
        missing, spare = sorted(found - listener.access.keys()), sorted(listener.access.keys() - found)
        raise ValueError(f"the table of access lacks {missing} and has {spare} without a route")
    app.router.routes.extend(routes)
    for name, value in {**listener.state, "access": listener.access, "door": listener.door}.items():
        setattr(app.state, name, value)
    for kind, answer in {**dict.fromkeys(EXPECTED, _refused), **listener.errors}.items():
        app.add_exception_handler(kind, answer)
    app.add_middleware(Envelope, doors=listener.doors, admit=listener.admit, form=listener.form)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    return refusal_of(request, error).response()


def principal_of(request: Request) -> Principal:
    """Return the caller. The access of the route must be KNOWN or a role."""
    found: Principal = request.state.principal
    return found


def member_of(request: Request) -> Membership:
    """Return the membership of the caller. The access of the route must be a role."""
    found: Membership = request.state.member
    return found


Member = Annotated[Membership, Depends(member_of)]


def caller_of(request: Request) -> str:
    """Return the subject of the caller's token; "" where the listener requires none."""
    member = getattr(request.state, "member", None)
    return "" if member is None else str(member.principal.subject)


def is_editor(request: Request) -> bool:
    """Return whether the caller is an editor of the project; True for a listener without accounts."""
    member: Membership | None = getattr(request.state, "member", None)
    return member is None or member.role.includes(Role.EDITOR)


# ---- The audit of actions outside the database of accounts.

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
    """Write a row of the audit before the block acts for a member.

    The block acts outside the database of accounts: in a registry, a run or a file. The row comes first, so
    that the action is audited even if the gateway is killed meanwhile. The row is deleted if the block raises
    a refusal, or a database is busy: nothing was done; it stays if no answer comes, as the action may have
    happened.

    request: id of an order that is polled under this id; all polls share one row. refusals: further
    exceptions that mean that nothing was done. detail: facts, neither secrets nor texts of a person.
    """
    accounts, project, by = parts.accounts, member.project, member.principal.subject
    facts = detail if request is None else detail | {"request": request}

    def write(session: Session, now: datetime) -> int | None:
        if request is not None and audit.is_noted(
            session, project=project, action=action, subject=subject, request=request
        ):
            return None
        row = audit.note(session, now, by=by, action=action, project=project, subject=subject, **facts)
        session.flush()
        return row.number

    number = accounts.run(write)
    known: tuple[type[Exception], ...] = (*_REFUSALS, *refusals)
    try:
        yield
    except known as error:
        if number is not None and (isinstance(error, Busy) or not isinstance(error, _UNKNOWN)):
            accounts.run(lambda session, _: audit.take_back(session, number))
        raise
