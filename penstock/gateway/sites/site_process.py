"""Process body of `penstock gateway NAME`: the API of a workload over one run.

    the run is found or begun ─► HTTP is served ─► draining ─► open requests are answered ─► the run drains

On loopback it asks for no token, and answers no other host, no page of another origin and no body that is no
JSON. Beyond it, a token of one project.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Form, Request
from pydantic import SecretStr
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.principal import Forbidden, Membership, NoSuchThing, Unauthenticated
from penstock.gateway.frame.api_errors import ApiError, CallLimits
from penstock.gateway.frame.envelope import Doors, Envelope, LetIn
from penstock.gateway.frame.route_access import Member, accounts_of, address_of
from penstock.gateway.http_server import HttpServer, check_listen
from penstock.gateway.routes.account_routes import shown_grant, sign_out, sign_up
from penstock.gateway.sites.site import RunBehind, Site, Upstream
from penstock.gateway.store.tables import Role
from penstock.protocol.limits import MIB
from penstock.rpc.address import is_local
from penstock.rpc.auth import Credentials
from penstock.rpc.gate import Rates
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

# ---- Signing in at a site that other machines reach: the gateway's own calls for it, at the same paths.

OPEN: Final = frozenset({"/api/auth/token", "/api/auth/sign-up"})
"""What somebody calls who has not signed in."""
_NONE: Final = SecretStr("")


_sign_in = APIRouter(tags=["accounts"])
_sign_in.post("/api/auth/sign-up", status_code=201)(sign_up)
_sign_in.post("/api/auth/sign-out", status_code=204)(sign_out)


@_sign_in.post("/api/auth/token")
def token(
    request: Request,
    grant_type: Annotated[str, Form(max_length=32)],
    username: Annotated[str, Form(max_length=128)] = "",
    password: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
    refresh_token: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
) -> dict[str, Any]:
    """Give an access token for a password, or a refresh token."""
    accounts = accounts_of(request)
    if grant_type == "password":
        grant = accounts.sign_in(username, password.get_secret_value(), address=address_of(request))
    elif grant_type == "refresh_token":
        grant = accounts.refresh(refresh_token.get_secret_value())
    else:
        raise ApiError(
            400, "use password or refresh_token", field="grant_type", error="unsupported_grant_type"
        )
    return shown_grant(grant)


@_sign_in.get("/api/me")
def me(member: Member) -> dict[str, str]:
    """Return who calls, and what they are in the project."""
    return {"name": member.principal.name, "project": member.project, "role": member.role.value}


# ---- The door of a site that other machines reach: a token of its project, before anything of a body is
# read.

_OF_ANYBODY: Final = frozenset({"/api/me", "/api/auth/sign-out"})
"""Of the routes of signing in, what every member may call."""


def token_door(accounts: Accounts, project: str, site: Site, admit: Callable[[str], None]) -> LetIn:
    """Return the door. project: whose tokens count. admit: counts a call of somebody; raises ApiError."""

    async def let_in(scope: Scope) -> None:
        if _is_open(site, scope["method"], scope["path"]):
            return
        member = await run_in_threadpool(_admitted, accounts, project, site, scope)
        admit(member.principal.subject)
        scope.setdefault("state", {}).update(member=member, principal=member.principal)

    return let_in


def _is_open(site: Site, method: str, path: str) -> bool:
    if method == "POST":
        return path in OPEN
    return method == "GET" and any(
        path == prefix or path.startswith(f"{prefix}/") for prefix in site.open_paths
    )


def _admitted(accounts: Accounts, project: str, site: Site, scope: Scope) -> Membership:
    header = Headers(scope=scope).get("authorization")
    if header is None:
        raise ApiError(401, "sign in, or send a token of the project: `Authorization: Bearer TOKEN`")
    try:
        member = accounts.membership(accounts.authenticate(header), project)
    except Unauthenticated as error:
        raise ApiError(401, str(error)) from error
    except (Forbidden, NoSuchThing) as error:
        raise ApiError(403, "you are no member of this project") from error
    least = Role.VIEWER if scope["path"] in site.viewer_paths | _OF_ANYBODY else Role.EDITOR
    if not member.role.includes(least):
        raise ApiError(403, f"your role in this project is {member.role}, this needs {least}")
    return member


log = logging.getLogger(__name__)

ROLE: Final = "gateway"
RATES: Final = Rates(calls=5000.0, bytes=512.0 * MIB, settings="per address")
"""What one address, or account, may ask for in a second: one program that acts and stores in a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Says who reaches a site.

    listen: HOST:PORT. project: whose tokens count; "" on loopback, where none is asked for. accounts: opens
    the accounts that know the tokens. insecure: plaintext beyond loopback.
    """

    listen: str
    doors: Doors = field(default_factory=Doors)
    project: str = ""
    accounts: Callable[[], AbstractContextManager[Accounts]] | None = None
    insecure: bool = False

    def check(self, *, encrypted: bool) -> None:
        """Raise ConfigurationError for an address that cannot be used, or that would ask callers nothing."""
        check_listen(self.listen, encrypted=encrypted, insecure=self.insecure)
        if not is_local(self.listen) and not self.project:
            raise ConfigurationError(
                f"--listen {self.listen}: beyond this machine a token is asked for: say --project NAME, and "
                "--state or --database of the gateway that gives out its tokens"
            )


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    site: Site,
    behind: RunBehind,
    reach: Reach,
    state: Path | None = None,
    agents: Mapping[str, RunBehind] | None = None,
    beside: Callable[[RunBehind], AbstractContextManager[object]] | None = None,
) -> int:
    """Serve until the lifecycle drains or the run is over; returns the exit code.

    state: folder in which the application may keep what it has to remember. agents: further runs by name; one
    that ends is missing, and the others are served. beside: makes what goes on for the run as long as it is
    served; None: nothing.
    Raises ConfigurationError for what cannot be used, Fatal for a run that failed.
    """
    section = settings.security
    own = credentials(section)
    reach.check(encrypted=own.certificate is not None)
    health = Health(ROLE)
    _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
    with ExitStack() as stack:
        accounts = stack.enter_context(reach.accounts()) if reach.project and reach.accounts else None
        run = stack.enter_context(behind)
        if beside is not None:
            stack.enter_context(beside(run))
        others = {name: stack.enter_context(one) for name, one in (agents or {}).items()}
        upstream = _upstream(run, own, state)
        kept = {name: None if state is None else state / "agents" / name for name in others}
        upstream = replace(
            upstream, agents={name: _upstream(one, own, kept[name]) for name, one in others.items()}
        )
        app = guarded_app(site, upstream, reach, accounts)
        http = HttpServer(
            app,
            reach.listen,
            certificate=section.tls_certificate,
            key=section.tls_key,
            insecure=reach.insecure,
            proxies=reach.doors.proxies,
            lifespan="on",
        )
        watch = threading.Thread(target=_watch, args=(run, lifecycle), name="run", daemon=True)
        watch.start()
        code = http.serve(lifecycle, health, ROLE, metrics_port, site.page)
        failure = run.failure()
    if failure:
        raise Fatal(f"the run behind it is over: {failure}")
    return code


def _upstream(run: RunBehind, own: Credentials, state: Path | None) -> Upstream:
    return Upstream(addresses=run.addresses, credentials=own, settings=run.settings, state=state)


def guarded_app(site: Site, upstream: Upstream, reach: Reach, accounts: Accounts | None) -> FastAPI:
    """Return the application of a site with what surrounds every request. accounts: None: no token."""
    app, limits = site.make_app(upstream), CallLimits(address=RATES, account=RATES)
    let_in = None
    if accounts is not None:
        app.state.accounts = accounts
        app.include_router(_sign_in)
        let_in = token_door(accounts, reach.project, site, limits.admit)
    doors = replace(reach.doors, large=frozenset())
    app.add_middleware(Envelope, doors=doors, admit=limits.admit_address, let_in=let_in)
    return app


def _watch(run: RunBehind, lifecycle: Lifecycle) -> None:
    while not lifecycle.draining.wait(1.0):
        if run.failure():
            lifecycle.drain("the run behind it is over")
