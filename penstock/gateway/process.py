"""Process body of a gateway.

    databases are opened ─► keys are read ─► HTTP is served ─► draining ─► end

It holds only its databases and keys: several gateways on one PostgreSQL and one file of keys are one
gateway to its callers.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.accounts.accounts import Accounts, sweep
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.accounts.oidc import OidcSignIn, Provider, ProviderSettings
from penstock.gateway.accounts.sessions import make_keys, read_keys
from penstock.gateway.application import Service, make_app
from penstock.gateway.frame.api_errors import CallLimits
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import Parts
from penstock.gateway.http_server import HttpServer, check_listen
from penstock.gateway.jobs.job_dispatcher import AT_ONCE, JobDispatcher
from penstock.gateway.jobs.job_records import Runner, Steering
from penstock.gateway.store.tables import open_database
from penstock.registry.records import SchemaMismatch, Unavailable
from penstock.registry.registry import Database, Registry, parse_url
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

ROLE = "gateway"
END_S: Final = 10.0
"""Seconds that a gateway which ends waits for what it is just writing about jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Names the places where a gateway keeps what it holds.

    state: folder of what has no place of its own. database, registry: URLs; "": SQLite files in `state`.
    keys: file of the signing keys; None: in `state`. models: folder below which models that were trained are
    exported; None: in `state`. Raises ConfigurationError for a URL of another kind.
    """

    state: Path
    database: str = ""
    registry: str = ""
    keys: Path | None = None
    models: Path | None = None

    def __post_init__(self) -> None:
        """Check both URLs, before one of the databases is made."""
        for option, said, called in (
            ("--database", self.database, "accounts database"),
            ("--registry", self.registry, "registry"),
        ):
            try:
                if said:
                    parse_url(said, called)
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
    """Says how jobs are run, as `launch` hands it in.

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
    else:  # a mistyped place is told by its database, not by the keys that are absent beside it
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


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    places: Places,
    doors: Doors,
    listen: str,
    insecure: bool,
    work: Callable[[], Work] | None = None,
    oidc: ProviderSettings | None = None,
    quotas: Quotas | None = None,
) -> int:
    """Serve until the lifecycle drains; returns the exit code. Nothing is written before all is checked.

    work: says how jobs are run; None: there are none. oidc: where people may sign in elsewhere.
    quotas: of each project.

    Raises ConfigurationError for an address, places or credentials that cannot be used, Fatal for a database
    that does not answer.
    """
    encrypted = credentials(settings.security).certificate is not None
    check_listen(listen, encrypted=encrypted, insecure=insecure)
    health = Health(ROLE)
    _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
    jobs = None if work is None else work()
    if jobs is not None:
        _check_models(places.models_folder())
    accounts, database = open_accounts(places)
    registry = open_registry(places)
    try:
        dispatcher = None if jobs is None else jobs.dispatcher(accounts, registry, places)
        elsewhere = (
            None if oidc is None else OidcSignIn(Provider(oidc), accounts, read_keys(places.keys_file()))
        )
        parts = Parts(
            accounts=accounts,
            registry=registry,
            limits=CallLimits(),
            dispatcher=dispatcher,
            state=places.state,
            oidc=elsewhere,
            quotas=quotas or Quotas(),
        )
        server = HttpServer(
            make_app(parts, doors, () if jobs is None else jobs.services),
            listen,
            certificate=settings.security.tls_certificate,
            key=settings.security.tls_key,
            insecure=insecure,
            proxies=doors.proxies,
        )
        beside = [_beside(lifecycle, "expiry", lambda end: sweep(accounts, end))]
        if dispatcher is not None:
            beside.append(_beside(lifecycle, "jobs", dispatcher.work))
        code = server.serve(lifecycle, health, ROLE, metrics_port)
        for thread in beside:
            thread.join(END_S)
    finally:
        registry.close()
        database.close()
    return code


def _check_models(folder: Path) -> None:
    """Make the folder of models: a training of hours would be exported to nowhere.

    Raises ConfigurationError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--models {folder}: {error.strerror}; name a folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--models {folder}: nothing can be written there; name another folder")


def _beside(lifecycle: Lifecycle, name: str, work: Callable[[threading.Event], None]) -> threading.Thread:
    thread = threading.Thread(target=work, args=(lifecycle.draining,), name=name, daemon=True)
    thread.start()
    return thread


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
