"""The registry of policy versions: which are kept, which serve clients, and the audit of decisions.

Each method is one transaction, safe between threads and processes; repeating a successful one changes
nothing. The registry stores no weights: the run keeps those of `pinned`, and its learner (`penstock policy`
where none runs) publishes a rollback as a new version (`record_rollback`).

    with Registry.open("sqlite:///runs/NAME/registry.sqlite", migrate=True) as registry:
        registry.register(NewVersion(policy="default", version=7, ...), by="learner")
        registry.promote("default", 7, "best so far", by="operator/ada", to=Status.CANARY, canary_share=0.1)
        route(registry.arms("default"), client_key)
"""

import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    inspect,
    select,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from penstock.config.configuration_error import how_to_install
from penstock.registry import feedback as late
from penstock.registry import ratings as rated
from penstock.registry import traffic as routed
from penstock.registry import versions
from penstock.registry.models import Base
from penstock.registry.records import (
    Busy,
    Conflict,
    RegistryError,
    SchemaMismatch,
    Unavailable,
    is_writable,
    reading_uri,
)
from penstock.runtime.retry import full_jitter, retry

# ---- The database behind the registry, and behind the accounts of a gateway.
#
# SQLite (write-ahead log, one writer at a time; on a local disk) or PostgreSQL (serialisable). A transaction
# that conflicts with another one is repeated for at most RETRY_S, then it raises Busy, or Conflict for
# a row that another one has added.

T = TypeVar("T")

BUSY_S: Final = 5.0
"""Seconds for which a writer waits for another writer."""
RETRY_S: Final = 10.0
"""Seconds for which a transaction with a conflict is repeated."""
CONNECT_S: Final = 5

_LOST = frozenset({"40001", "40P01", "55P03", "23505"})  # serialisation, deadlock, lock, unique
_LOST_SQLITE = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")
_NO_DATABASE = ("SQLITE_NOTADB", "SQLITE_CORRUPT")
_DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def parse_url(url: str, called: str = "registry") -> URL:
    remedy = "use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError(f"{called} url: not a URL: {remedy}") from error
    shown = parsed.render_as_string(hide_password=True)
    if parsed.drivername not in {*_DRIVERS, *_DRIVERS.values()}:
        raise ValueError(f"{called} url={shown!r}: {parsed.drivername!r} is not supported: {remedy}")
    if parsed.drivername.startswith("sqlite") and parsed.database in (None, "", ":memory:"):
        raise ValueError(f"{called} url={shown!r} names no file: {remedy}")
    return parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))


def make_engine(url: URL) -> Engine:
    """Return an engine whose transactions are serialisable; nothing is connected yet."""
    try:
        if url.drivername.startswith("sqlite"):
            return _sqlite_engine(url)
        # A database without a locale (SQL_ASCII) would return bytes instead of text.
        arguments = {"client_encoding": "utf8", "connect_timeout": CONNECT_S}
        return create_engine(
            url,
            isolation_level="SERIALIZABLE",
            pool_pre_ping=True,
            connect_args={key: value for key, value in arguments.items() if key not in url.query},
            hide_parameters=True,
        )
    except (ImportError, NoSuchModuleError) as error:
        raise RegistryError(
            f"registry url={url.render_as_string(hide_password=True)!r}: its driver is absent: "
            f"{how_to_install('postgresql')}"
        ) from error


def _reading_engine(uri_now: Callable[[], str]) -> Engine:
    """Return an engine that changes nothing; `uri_now` gives SQLite's URI for each new connection."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            uri_now(), timeout=BUSY_S, uri=True, isolation_level=None, check_same_thread=False
        )

    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_S}, hide_parameters=True)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    """Leave transactions to SQLAlchemy; readers and the writer do not wait for each other."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # a promotion that was answered survives a loss of power


def _begin_sqlite(connection: Connection) -> None:
    """Lock at the begin of a writing transaction, so that its reads are valid when it writes."""
    reading = connection.get_execution_options().get("reading", False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


class Database:
    """Runs functions in transactions; safe between threads, not across a fork."""

    def __init__(self, url: str, called: str = "registry", *, only_read: bool = False) -> None:
        """called: name in messages. only_read: do not change a file of SQLite; `write` raises Unavailable."""
        parsed = parse_url(url, called)
        self.called = called
        self.shown = parsed.render_as_string(hide_password=True)
        """The URL without its password, for messages."""
        self.file = Path(parsed.database or "") if parsed.drivername.startswith("sqlite") else None
        self.only_read = only_read and self.file is not None
        if self.file is not None and self.only_read:
            self._engine = _reading_engine(partial(reading_uri, self.file))
        else:
            self._engine = make_engine(parsed)
        self._reading: Engine = self._engine.execution_options(reading=True)
        # After waiting for a lock it sees newer commits, as transactions of SQLite always do.
        self._committed = (
            self._engine
            if self.file is not None
            else self._engine.execution_options(isolation_level="READ COMMITTED")
        )
        self._never = threading.Event()

    def read(self, work: Callable[[Session], T]) -> T:
        """Return the result of `work` in one consistent view; raises Unavailable."""
        return self._run(self._reading, work)

    def write(self, work: Callable[[Session], T]) -> T:
        """Return the result of `work`, committed; `work` may run several times."""
        if self.only_read:
            raise Unavailable(f"{self.called} {self.shown} is only read: its folder cannot be written to")
        return self._run(self._engine, work)

    def write_together(self, work: Callable[[Session], T]) -> T:
        """Return the result of `work`, committed, as `write` does, for work on a row that many change.

        On PostgreSQL each statement sees the commits before it (READ COMMITTED), so that it waits for others
        instead of being repeated; `work` must be correct under that.
        """
        if self.only_read:
            return self.write(work)
        return self._run(self._committed, work)

    def migrate(self, work: Callable[[Connection], T]) -> T:
        """Run `work` as `write` does, to make the tables; `work` locks them itself."""
        return self._run(self._committed, lambda session: work(session.connection()))

    def close(self) -> None:
        self._engine.dispose()

    def _run(self, engine: Engine, work: Callable[[Session], T]) -> T:
        def once() -> T:
            with Session(engine, expire_on_commit=False) as session, session.begin():
                return work(session)

        try:
            return retry(
                once,
                retryable=_lost,
                stop=self._never,
                give_up_s=RETRY_S,
                delays=full_jitter(0.01, 0.5),
            )
        except DBAPIError as error:
            if _lost(error):
                raise self._given_up(error) from error
            if isinstance(error, OperationalError):
                raise Unavailable(f"{self.called} {self.shown} does not answer: {error.orig}") from error
            if getattr(error.orig, "sqlite_errorname", "") in _NO_DATABASE:
                raise SchemaMismatch(
                    f"{self.called} {self.shown}: {error.orig}; name another file"
                ) from error
            raise  # a constraint that this package should have checked: a defect

    def _given_up(self, error: DBAPIError) -> Conflict | Busy:
        """Return the error of a transaction that was repeated in vain; only rows can be the same thing."""
        said = f"{self.called} {self.shown}: for {RETRY_S:g} s others kept "
        if isinstance(error, IntegrityError):
            return Conflict(f"{said}adding the same row ({error.orig}): look at the state and try again")
        return Busy(f"{said}writing ({error.orig}): nothing was changed; try again")


def _lost(error: Exception) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    origin: Any = error.orig
    if isinstance(origin, sqlite3.Error):
        return (getattr(origin, "sqlite_errorname", None) or "").startswith(_LOST_SQLITE)
    return getattr(origin, "sqlstate", None) in _LOST


# ---- The tables of a database: made where there are none, refused where they are of another revision.

_LOCK: Final = 0x70656E73
"""PostgreSQL's advisory lock under which the tables are made: several processes may open a database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The tables of one kind of database, and their revision.

    tables: as the models declare them. revision: a change of a table needs another one. version_table: where
    a database of this kind notes its revision. remedy: what to do about tables that are absent.
    """

    tables: MetaData
    revision: str
    version_table: str = "alembic_version"
    remedy: str = "open it once with migrate=True"

    def checked(self, database: Database, *, migrate: bool) -> Database:
        """Return the database with its tables, made with `migrate` where there are none.

        Raises SchemaMismatch for tables that are absent or of another revision, Unavailable; then the
        database is closed.
        """
        with ExitStack() as on_failure:
            on_failure.callback(database.close)
            if migrate:
                database.migrate(lambda connection: self._make(connection, database))
            elif database.file is not None and not database.file.exists():
                raise SchemaMismatch(f"{_named(database)}: no such file: {self.remedy}")
            else:
                database.read(lambda session: self._check(session.connection(), database))
            on_failure.pop_all()
        return database

    def _make(self, connection: Connection, database: Database) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if self._current(connection) is not None:
            self._check(connection, database)
            return
        self.tables.create_all(connection)
        noted = self._noted()
        noted.create(connection, checkfirst=True)
        connection.execute(noted.insert().values(version_num=self.revision))

    def _check(self, connection: Connection, database: Database) -> None:
        found = self._current(connection)
        if found is None:
            raise SchemaMismatch(
                f"{_named(database)}: its tables are absent, this program needs {self.revision}: "
                f"{self.remedy}"
            )
        if found != self.revision:
            raise SchemaMismatch(
                f"{_named(database)}: its tables are of revision {found}, this program needs "
                f"{self.revision}: use the Penstock that made them, or another {database.called}"
            )

    def _current(self, connection: Connection) -> str | None:
        """Return the revision of the tables that are there; None: there are none."""
        if not inspect(connection).has_table(self.version_table):
            return None
        return connection.scalar(select(self._noted().c.version_num))

    def _noted(self) -> Table:
        """Return the table with the revision, in the form that earlier releases made by alembic."""
        metadata = MetaData(naming_convention={"pk": "%(table_name)s_pkc"})
        return Table(self.version_table, metadata, Column("version_num", String(32), primary_key=True))


def _named(database: Database) -> str:
    return f"{database.called} {database.shown}"


REGISTRY: Final = Schema(tables=Base.metadata, revision="0010")


# ---- The registry.

P = ParamSpec("P")


def _method(
    transaction: Callable[[Database, Callable[[Session], T]], T], work: Callable[Concatenate[Session, P], T]
) -> Callable[Concatenate["Registry", P], T]:
    """Return `work` as a method that runs it in one transaction."""

    @wraps(work)
    def method(registry: "Registry", /, *arguments: P.args, **named: P.kwargs) -> T:
        return transaction(registry.database, lambda session: work(session, *arguments, **named))

    return method


class Registry:
    """An open registry; construct it with `open` or `read`. Every method may raise Unavailable.

    The functions of `versions`, `traffic`, `feedback` and `ratings` document the methods.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str, *, migrate: bool = False) -> Self:
        """Return the registry at `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.

        migrate: make absent tables. A file that cannot be written is only read.
        Raises SchemaMismatch for tables that are absent or of another revision, ValueError for another URL.
        """
        database = Database(url)
        if database.file is not None and database.file.exists() and not is_writable(database.file):
            database.close()
            return cls.read(url)
        return cls(REGISTRY.checked(database, migrate=migrate))

    @classmethod
    def read(cls, url: str) -> Self:
        """Return a registry that is only read: a file of SQLite and its folder are not changed."""
        database = Database(url, only_read=True)
        if database.file is not None and not database.file.is_file():
            raise SchemaMismatch(f"registry {database.shown}: no such file; name one that is there")
        return cls(REGISTRY.checked(database, migrate=False))

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    register = _method(Database.write, versions.register)
    reserve = _method(Database.write, versions.reserve)
    record_evaluation = _method(Database.write, versions.record_evaluation)
    promote = _method(Database.write, versions.promote)
    rollback = _method(Database.write, versions.rollback)
    record_rollback = _method(Database.write, versions.record_rollback)
    retire = _method(Database.write, versions.retire)
    get = _method(Database.read, versions.get)
    list = _method(Database.read, versions.every)
    policies = _method(Database.read, versions.policies)
    pinned = _method(Database.read, versions.pinned)
    active = _method(Database.read, versions.active)
    canary = _method(Database.read, versions.canary)
    standby = _method(Database.read, versions.standby)
    awaiting_number = _method(Database.read, versions.awaiting_number)
    events = _method(Database.read, versions.events)

    name = _method(Database.write, routed.name)
    labels = _method(Database.read, routed.labels)
    number = _method(Database.read, routed.labelled)
    traffic = _method(Database.read, routed.current)
    set_traffic = _method(Database.write, routed.set_traffic)
    arms = _method(Database.read, routed.arms)
    judge = _method(Database.write, routed.judge)
    trial = _method(Database.read, routed.look)

    add_feedback = _method(Database.write, late.add)
    delete_feedback = _method(Database.write, late.delete_of)
    feedback = _method(Database.read, late.read)
    feedback_count = _method(Database.read, late.count_of)

    def add_ratings(
        self, policy: str, new: Sequence[rated.Rating], bounds: rated.RatingBounds | None = None
    ) -> tuple[rated.KeptRating, ...]:
        """Store ratings of responses of a policy; see `ratings.add`."""
        made = rated.prepared(policy, new)
        return self.database.write_together(lambda session: rated.add(session, made, bounds))

    rating_numbers = _method(Database.read, rated.numbers_of)
    delete_ratings = _method(Database.write, rated.delete)
    tally = _method(Database.read, rated.tally)
    rated_conversations = _method(Database.read, rated.rated_conversations)
    ratings = _method(Database.read, rated.read)
