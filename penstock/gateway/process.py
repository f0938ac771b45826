"""Process body of a gateway: its listeners, each at its own address.

    databases are opened, runs found or started ─► HTTP is served ─► draining ─► open requests end ─► runs end

A gateway with accounts keeps its state in databases and a file of keys: several gateways may share them. A
service over a run requires no token on loopback, and beyond it a token of one project.
"""

import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fastapi import FastAPI

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.accounts.accounts import Accounts, sweep
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.accounts.oidc import OidcSignIn, Provider, ProviderSettings
from penstock.gateway.accounts.sessions import make_keys, read_keys
from penstock.gateway.application import Service, gateway_listener, site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.requests import ApiError, CallLimits
from penstock.gateway.frame.route_access import Listener, Parts, make_app
from penstock.gateway.http_server import HttpServer, check_listen, serve
from penstock.gateway.jobs.job_dispatcher import AT_ONCE, JobDispatcher
from penstock.gateway.jobs.job_records import Runner, Steering
from penstock.gateway.store.tables import open_database
from penstock.gateway.upstream import RunBehind, Upstream
from penstock.registry.records import SchemaMismatch, Unavailable
from penstock.registry.registry import Database, Registry, parse_url
from penstock.rpc.address import is_local
from penstock.rpc.auth import Credentials
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

ROLE = "gateway"
END_S: Final = 10.0
"""Seconds that a gateway waits at its end for each background thread."""
_NOTHING: Final = "a listener has nothing to serve"
Background = Callable[[threading.Event], None]
"""Work of a background thread, until the event is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a gateway keeps its data.

    state: folder of everything below whose place is not given. database, registry: URLs; "": SQLite files in
    `state`. keys: file of the signing keys; None: in `state`. models: folder below which trained models are
    exported; None: in `state`. Raises ConfigurationError for a malformed URL.
    """

    state: Path
    database: str = ""
    registry: str = ""
    keys: Path | None = None
    models: Path | None = None

    def __post_init__(self) -> None:
        """Check both URLs, before one of the databases is made."""
        for option, url, called in (
            ("--database", self.database, "accounts database"),
            ("--registry", self.registry, "registry"),
        ):
            try:
                if url:
                    parse_url(url, called)
            except ValueError as error:
                raise ConfigurationError(f"{option}: {error}") from error

    def database_url(self) -> str:
        return self.database or self._file("accounts.sqlite")

    def registry_url(self) -> str:
        return self.registry or self._file("registry.sqlite")

    def keys_file(self) -> Path:
        return self.keys or self.state / "keys.json"

    def models_folder(self) -> Path:
        return self.models or self.state / "models"

    def _file(self, name: str) -> str:
        return f"sqlite:///{self.state.absolute() / name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How jobs are run, as `launch` defines it.

    at_once: jobs that run at the same time. services: routes and kinds of jobs of workloads.
    """

    runner: Runner
    steering: Steering
    at_once: int = AT_ONCE
    services: Sequence[Service] = ()

    def dispatcher(self, accounts: Accounts, registry: Registry, places: Places) -> JobDispatcher:
        kinds = {name: kind for one in self.services for name, kind in one.kinds.items()}
        return JobDispatcher(
            accounts,
            registry,
            self.runner,
            kinds,
            models=places.models_folder(),
            at_once=self.at_once,
            steering=self.steering,
            registry_url=places.registry_url(),
        )


def open_accounts(places: Places, *, make: bool = True) -> tuple[Accounts, Database]:
    """Open the accounts. make: tables and keys, where there are none.

    Raises ConfigurationError for places that cannot be used, Fatal for a database that does not answer.
    """
    if make:
        _make_keys(places)
    else:  # so that the error of a mistyped place names the database, not the absent keys
        open_accounts_database(places, make=False).close()
    keys = read_keys(places.keys_file())
    database = open_accounts_database(places, make=make)
    return Accounts(database, keys), database


def _make_keys(places: Places) -> None:
    try:
        if not places.database or places.keys is None:
            places.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"--state {places.state}: {error.strerror}; name a folder") from error
    try:
        make_keys(places.keys_file())
    except OSError as error:
        raise ConfigurationError(f"--keys {places.keys_file()}: {error.strerror}") from error


def open_accounts_database(places: Places, *, make: bool = True) -> Database:
    """Open the database of the accounts. make: its tables, where there are none.

    Raises ConfigurationError for a place that cannot be used, Fatal for a database that does not answer.
    """
    try:
        return open_database(places.database_url(), migrate=make)
    except (SchemaMismatch, ValueError) as error:
        raise ConfigurationError(f"--database: {error}") from error
    except Unavailable as error:
        raise Fatal(str(error)) from error


# ---- The listeners of one process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A listener at an address, HOST:PORT.

    open: yields the listener, and its background work by name. option: prefix of the address in errors.
    insecure: allow plaintext beyond loopback. kept_here: error text for an address beyond loopback; "": such
    an address is allowed. is_plain: serve plaintext even if there is a certificate. proxies: trusted ones.
    page: path of the page for people. is_one_of_several: if it cannot be opened, it answers 503 with the
    reason, and the other listeners stay up.
    """

    name: str
    listen: str
    open: Callable[[], AbstractContextManager[tuple[Listener, Mapping[str, Background]]]]
    option: str = "--listen "
    insecure: bool = False
    kept_here: str = ""
    is_plain: bool = False
    proxies: tuple[str, ...] = ()
    page: str = ""
    is_one_of_several: bool = False

    def check(self, *, encrypted: bool) -> None:
        """Raise ConfigurationError for an address that cannot be used, or that others must not reach."""
        if self.kept_here and not is_local(self.listen):
            raise ConfigurationError(f"{self.option}{self.listen}: {self.kept_here}")
        check_listen(self.listen, encrypted=encrypted, insecure=self.insecure, option=self.option)


def main(lifecycle: Lifecycle, settings: Settings, mounts: Sequence[Mount]) -> int:
    """Serve until the lifecycle drains; returns the exit code. Nothing is written before all is checked.

    Raises ConfigurationError for an address, places or credentials that cannot be used, Fatal for a database
    that does not answer and for a run that failed.
    """
    section = settings.security
    encrypted = credentials(section).certificate is not None
    for one in mounts:
        one.check(encrypted=encrypted)
    _check_apart(mounts)
    health = Health(ROLE)
    _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
    with ExitStack() as stack:
        servers, threads = dict[HttpServer, str](), list[threading.Thread]()
        background = dict[str, Background]()
        for one in mounts:
            app, works = _opened(one, stack)
            background |= {f"{name} of {one.name}": work for name, work in works.items()}
            server = HttpServer(
                app,
                one.listen,
                certificate=None if one.is_plain else section.tls_certificate,
                key=None if one.is_plain else section.tls_key,
                insecure=one.insecure,
                proxies=one.proxies,
                option=one.option,
            )
            servers[server] = one.page
        for name, work in background.items():
            threads.append(threading.Thread(target=work, args=(lifecycle.draining,), name=name, daemon=True))
            threads[-1].start()
        code = serve(servers, lifecycle, health, ROLE, metrics_port)
        for thread in threads:
            thread.join(END_S)
    return code


def _check_apart(mounts: Sequence[Mount]) -> None:
    """Raise ConfigurationError for two listeners at one address."""
    taken = dict[str, str]()
    for one in mounts:
        address = one.listen
        if address in taken and not address.endswith(":0"):
            raise ConfigurationError(
                f"--site {one.name}: {taken[address]} listens at {address}, too: say --site "
                f"{one.name}=HOST:PORT with another port"
            )
        taken[address] = one.name


def _opened(mount: Mount, stack: ExitStack) -> tuple[FastAPI, Mapping[str, Background]]:
    """Return the application of a mount and its background work; one of several may answer why it failed."""
    try:
        listener, background = stack.enter_context(mount.open())
        if mount.is_one_of_several:
            listener = _kept_apart(mount.name, listener)
        return make_app(listener), background
    except Exception as error:
        if not mount.is_one_of_several:
            raise
        log.exception(_NOTHING, extra={"listener": mount.name})
        refuse = partial(_refuse, f"{mount.name} is not served: {error}")
        return make_app(Listener(title=mount.name, routers=[], access={}, admit=refuse)), {}


def _kept_apart(name: str, listener: Listener) -> Listener:
    """Return the listener, changed to answer why its `life` failed to start instead of ending its server."""
    if listener.life is None:
        return listener
    begin, why = listener.life, ""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        nonlocal why
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(begin(app))
            except Exception as error:
                log.exception(_NOTHING, extra={"listener": name})
                why = f"{name} is not served: {error}"
            yield

    def admit(address: str) -> None:
        if why:
            _refuse(why)
        listener.admit(address)

    return replace(listener, life=life, admit=admit)


def _refuse(why: str, _address: str = "") -> None:
    raise ApiError(503, why, retry_s=5.0)


@contextmanager
def gateway_of(
    places: Places,
    doors: Doors,
    work: Callable[[], Work] | None = None,
    oidc: ProviderSettings | None = None,
    quotas: Quotas | None = None,
) -> Iterator[tuple[Listener, Mapping[str, Background]]]:
    """Yield the listener of a gateway with accounts, and its background work.

    work: makes what runs jobs; None: there are no jobs. oidc: provider at which people may sign in. quotas:
    of each project.
    """
    jobs = None if work is None else work()
    if jobs is not None:
        _check_models(places.models_folder())
    accounts, database = open_accounts(places)
    registry = open_registry(places)
    try:
        dispatcher = None if jobs is None else jobs.dispatcher(accounts, registry, places)
        parts = Parts(
            accounts=accounts,
            registry=registry,
            limits=CallLimits(),
            dispatcher=dispatcher,
            state=places.state,
            oidc=None
            if oidc is None
            else OidcSignIn(Provider(oidc), accounts, read_keys(places.keys_file())),
            quotas=quotas or Quotas(),
        )
        background: dict[str, Background] = {"expiry": partial(sweep, accounts)}
        if dispatcher is not None:
            background["jobs"] = dispatcher.work
        yield gateway_listener(parts, doors, () if jobs is None else jobs.services), background
    finally:
        registry.close()
        database.close()


@contextmanager
def site_over(
    service: Service,
    run: RunBehind,
    own: Credentials,
    doors: Doors,
    on_end: Callable[[str], None] | None = None,
    *,
    state: Path | None = None,
    agents: Mapping[str, RunBehind] = MappingProxyType({}),
    loop: AbstractContextManager[object] | None = None,
    accounts: Callable[[], AbstractContextManager[Accounts]] | None = None,
    project: str = "",
) -> Iterator[tuple[Listener, Mapping[str, Background]]]:
    """Enter a run, and yield the listener of a service over it; raises Fatal for a run that failed.

    own: credentials for calls of the run. on_end: called when the run is over; None: the listener answers
    why, and nothing else ends. state: folder in which the service may keep what it has to remember. agents:
    further runs by name; one that ends is missing, and the others are served. loop: what learns from the run
    as long as it is served. accounts: opens those that issue the tokens of `project`; None: no token is
    required.
    """
    over = ""

    def watch(draining: threading.Event) -> None:
        nonlocal over
        while not over and not draining.wait(1.0):
            over = run.failure()
        if over and on_end is not None:
            on_end("the run that this gateway serves is over")

    def admit(address: str) -> None:
        if over:
            _refuse(f"the run that this gateway serves is over: {over}")
        listener.admit(address)

    def upstream(one: RunBehind, kept: Path | None) -> Upstream:
        return Upstream(addresses=one.addresses, credentials=own, settings=one.settings, state=kept)

    with ExitStack() as stack:
        issuer = None if accounts is None else stack.enter_context(accounts())
        for one in (run, *([] if loop is None else [loop]), *agents.values()):
            stack.enter_context(one)
        others = {name: upstream(one, state and state / "agents" / name) for name, one in agents.items()}
        behind = replace(upstream(run, state), agents=others)
        listener = site_listener(service, behind, doors, issuer, project)
        yield replace(listener, admit=admit), {"run": watch}
        failure = run.failure() if on_end is not None else ""
    if failure:
        raise Fatal(f"the run that this gateway serves is over: {failure}")


def _check_models(folder: Path) -> None:
    """Make the folder of models at the start, since a training of hours is exported to it.

    Raises ConfigurationError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--models {folder}: {error.strerror}; name a folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--models {folder}: nothing can be written there; name another folder")


def open_registry(places: Places) -> Registry:
    """Open the registry, with tables made where there are none.

    Raises ConfigurationError for a place that cannot be used, Fatal for a database that does not answer.
    """
    try:
        return Registry.open(places.registry_url(), migrate=True)
    except (SchemaMismatch, ValueError) as error:
        raise ConfigurationError(f"--registry: {error}") from error
    except Unavailable as error:
        raise Fatal(str(error)) from error
