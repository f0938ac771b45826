"""A gateway without a process: its application on a database, with a clock that a test moves."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

from fastapi.testclient import TestClient

from penstock.gateway.accounts import api_tokens, sessions, users
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.accounts.oidc import OidcSignIn, Provider, ProviderSettings
from penstock.gateway.accounts.principal import Membership, Principal
from penstock.gateway.accounts.sessions import Keys, make_keys, read_keys
from penstock.gateway.application import Service, gateway_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.requests import CallLimits
from penstock.gateway.frame.route_access import Parts, make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_dispatcher import JobDispatcher
from penstock.gateway.jobs.job_records import Job, Runner
from penstock.gateway.store.tables import AuditRow, Role, open_database
from penstock.registry.registry import Registry
from penstock.rpc.gate import Rates
from tests.support.gateway.described_answers import hold_to_document
from tests.support.storage.postgresql_server import with_registry, with_tables

PASSWORD: Final = "correct horse battery"  # noqa: S105 - only the tests'
HOST: Final = "127.0.0.1"
ADDRESS: Final = f"http://{HOST}"
_MANY: Final = Rates(calls=1e6, bytes=1e9)


def _accounts(url: str) -> None:
    open_database(url, migrate=True).close()


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[HttpServer]:
    """An application on a free port of loopback."""
    server = HttpServer(app, f"{HOST}:0", **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Clock:
    """Tells the time that a test says."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_time(self, **of: float) -> None:
        self.now += timedelta(**of)


@dataclass
class SmallGateway:
    """A gateway's accounts and what calls its application."""

    accounts: Accounts
    registry: Registry
    keys: Keys
    clock: Clock
    client: TestClient
    parts: Parts
    people: dict[str, str] = field(default_factory=dict)
    """Ids of those who were added, by name."""

    @classmethod
    def at(
        cls,
        url: str,
        registry_url: str,
        folder: Path,
        *,
        runner: Runner | None = None,
        services: Sequence[Service] = (),
        oidc: ProviderSettings | None = None,
        quotas: Quotas | None = None,
        is_another: bool = False,
        **limits: Rates,
    ) -> Self:
        """Open one; limits: of calls, as CallLimits takes them.

        oidc: where people may sign in elsewhere. runner: of jobs, which are queued and not taken until a
        test has the dispatcher look. is_another: of an installation that is there.
        """
        make_keys(folder / "keys.json")
        keys, clock = read_keys(folder / "keys.json"), Clock()
        if not is_another:
            with_tables(url, _accounts)
            with_registry(registry_url)
        accounts = Accounts(open_database(url, migrate=True), keys, clock)
        registry = Registry.open(registry_url, migrate=True)
        calls = CallLimits(limits.get("address", _MANY), limits.get("account", _MANY))
        kinds = {name: kind for one in services for name, kind in one.kinds.items()}
        dispatcher = None
        if runner is not None:
            dispatcher = JobDispatcher(accounts, registry, runner, kinds, models=folder / "models")
        elsewhere = None if oidc is None else OidcSignIn(Provider(oidc), accounts, keys)
        parts = Parts(
            accounts=accounts,
            registry=registry,
            limits=calls,
            dispatcher=dispatcher,
            state=folder,
            oidc=elsewhere,
            quotas=quotas or Quotas(),
        )
        app = make_app(gateway_listener(parts, Doors(), services))
        client = TestClient(app, base_url=ADDRESS, raise_server_exceptions=False)
        hold_to_document(client, app)
        return cls(accounts=accounts, registry=registry, keys=keys, clock=clock, client=client, parts=parts)

    @classmethod
    def in_folder(cls, folder: Path, url: str = "", **options: Any) -> Self:
        """One whose registry is in the PostgreSQL of `url`, or in a file of the folder as all else is."""
        url = url or f"sqlite:///{folder}/accounts.sqlite"
        registry = f"sqlite:///{folder}/registry.sqlite" if url.startswith("sqlite") else url
        return cls.at(url, registry, folder, **options)

    @property
    def dispatcher(self) -> JobDispatcher:
        """Of one that has a runner."""
        assert self.parts.dispatcher is not None
        return self.parts.dispatcher

    def submit(self, agent: str, *, project: str = "alpha", key: str | None = None, **of: Any) -> Job:
        """A new job of ada's; of: its template and numbers."""
        ada = Principal(subject="user/ada", name="ada", user="ada")
        member = Membership(principal=ada, project=project, role=Role.EDITOR)
        what: dict[str, Any] = {"template": "quick", "numbers": {}, "facts": {}} | of
        return self.accounts.run(
            lambda session, now: job_queue.submit(session, now, member, agent=agent, request_key=key, **what)
        )

    def job(self, job: Job) -> Job:
        """It as it is now."""
        return self.accounts.look(lambda session: job_queue.get(session, job.project, job.id))

    def person(self, name: str, project: str | None = None, role: Role = Role.EDITOR) -> str:
        """Add a person, with no password: argon2id takes time that few tests need."""
        if name not in self.people:

            def work(session: Any, now: datetime) -> str:
                return users.add(session, now, name=name, password="-", by="test").id  # noqa: S106

            self.people[name] = self.accounts.run(work)
        if project is not None:
            self.accounts.add_member(name, project=project, role=role, by="test")
        return self.people[name]

    def bearer(self, name: str) -> dict[str, str]:
        def work(session: Any, now: datetime) -> str:
            user = users.known(session, name)
            return sessions.begin(session, now, self.keys, user).access

        return {"Authorization": f"Bearer {self.accounts.run(work)}"}

    def token(self, project: str, role: Role = Role.EDITOR) -> dict[str, str]:
        def work(session: Any, now: datetime) -> str:
            return api_tokens.add(session, now, project=project, name="t", role=role, days=None, by="test")[1]

        return {"Authorization": f"Bearer {self.accounts.run(work)}"}

    def sign_in(self, **form: str) -> Any:
        return self.client.post("/api/auth/token", data=form)

    def get(self, path: str, headers: Mapping[str, str]) -> Any:
        return self.client.get(path, headers=dict(headers))

    def actions(self, project: str | None = None) -> list[str]:
        def work(session: Any) -> list[str]:
            rows = session.query(AuditRow).order_by(AuditRow.number)
            return [row.action for row in rows if project is None or row.project == project]

        return self.accounts.look(work)
