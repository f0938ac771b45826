"""Which caller may call which route: the one table, the routes that keep to it, and the audit of calls.

A route that is not in the table is refused when the application is made, and so is a line without its route.
The caller is known, and their role looked up, before anything of the body is read.
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
from penstock.registry.records import RegistryError, Unavailable
from penstock.registry.registry import Registry

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
"""Of the gateway's own routes; a workload adds those of its own."""


# ---- The door of a listener, the routes that it guards, and the application that is made of both.

Door = Callable[[Request, Access], Awaitable[Response | None]]
"""Who may call a route: returns what is answered in its place, raises ApiError or AccountError."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


async def open_door(_request: Request, _access: Access) -> None:
    """Admit every caller as an owner: a listener on loopback without accounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDoor:
    """Lets in who shows a token. project: whose members alone may come; "": that which the request names."""

    accounts: "Accounts"
    limits: CallLimits
    project: str = ""

    async def __call__(self, request: Request, access: Access) -> None:
        """Find out who calls and whether they may; raises an AccountError."""
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
        """Return what the caller is in the project that the request is about."""
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
        """Return what answers a request of somebody who may call."""
        return super().get_route_handler()


class JsonRoute(GuardedRoute):
    """Refuses what is posted as anything but JSON."""

    is_json_alone = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Says what is served at one address: its routers and nothing else.

    access: who may call each route. admit: counts a request of an address; raises ApiError where it is one
    too many. state: of the application. form: of what is refused before a route is found. errors: handlers
    beside those of every gateway. life: begins and ends something of its own.
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
    """Return the application of a listener, which serves no pages of the framework's own.

    Raises ValueError unless the table of access has every route of the routers, and no other.
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
        raise ValueError(f"routes {loose}: they are no GuardedRoute, so that no rule says who may call them")
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
    """Return who calls; of a route whose access is at least KNOWN."""
    found: Principal = request.state.principal
    return found


def member_of(request: Request) -> Membership:
    """Return what the caller is in the project; of a route whose access names a role."""
    found: Membership = request.state.member
    return found


Member = Annotated[Membership, Depends(member_of)]


def caller_of(request: Request) -> str:
    """Return the subject of the caller's token; "" where the listener requires none."""
    member = getattr(request.state, "member", None)
    return "" if member is None else str(member.principal.subject)


def is_editor(request: Request) -> bool:
    """Return whether the caller looks after the project; on loopback everybody does."""
    member: Membership | None = getattr(request.state, "member", None)
    return member is None or member.role.includes(Role.EDITOR)


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
