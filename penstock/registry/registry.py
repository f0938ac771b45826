"""The registry of policy versions: which are kept, which serve, and what was decided about them.

Each method is one transaction, safe between threads and processes; repeating one that succeeded changes
nothing. The registry stores no weights: their holder keeps those of `pinned`, and publishes a rollback as a
new version (`record_rollback`).

    with Registry.open("sqlite:///runs/NAME/registry.sqlite", migrate=True) as registry:
        registry.register(NewVersion(policy="default", version=7, ...), by="learner")
        registry.promote("default", 7, "best so far", by="operator/ada", to=Status.CANARY, canary_share=0.1)
        route(registry.arms("default"), client_key)
"""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy.orm import Session

from penstock.registry import feedback as late
from penstock.registry import ratings as rated
from penstock.registry import traffic as routed
from penstock.registry import versions
from penstock.registry.database import REGISTRY, Database
from penstock.registry.records import SchemaMismatch, is_writable

P = ParamSpec("P")
T = TypeVar("T")


def _method(
    transaction: Callable[[Database, Callable[[Session], T]], T], work: Callable[Concatenate[Session, P], T]
) -> Callable[Concatenate["Registry", P], T]:
    """Return `work` as a method that does it in a transaction of its own."""

    @wraps(work)
    def method(registry: "Registry", /, *arguments: P.args, **named: P.kwargs) -> T:
        return transaction(registry.database, lambda session: work(session, *arguments, **named))

    return method


class Registry:
    """An open registry; build it with `open`. Every method may raise Unavailable.

    What a method does, takes and raises is said where its function stands.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str, *, migrate: bool = False) -> Self:
        """Return the registry at `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.

        migrate: make the tables where there are none. A file that cannot be written is only read.
        Raises SchemaMismatch for tables that are absent or of another revision, ValueError for another URL.
        """
        database = Database(url)
        if database.file is not None and database.file.exists() and not is_writable(database.file):
            database.close()
            return cls.read(url)
        return cls._opened(database, migrate=migrate)

    @classmethod
    def read(cls, url: str) -> Self:
        """Return the registry of that URL, to be read: a file of SQLite and its folder stay as they are."""
        database = Database(url, only_read=True)
        if database.file is not None and not database.file.is_file():
            raise SchemaMismatch(f"registry {database.shown}: no such file; name one that is there")
        return cls._opened(database, migrate=False)

    @classmethod
    def _opened(cls, database: Database, *, migrate: bool) -> Self:
        try:
            REGISTRY.open(database, migrate=migrate)
        except BaseException:
            database.close()
            raise
        return cls(database)

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

    add_ratings = _method(Database.write_together, rated.add)
    rating_numbers = _method(Database.read, rated.numbers_of)
    delete_ratings = _method(Database.write, rated.delete)
    tally = _method(Database.read, rated.tally)
    rated_conversations = _method(Database.read, rated.rated_conversations)
    ratings = _method(Database.read, rated.read)
