"""The registry of policy versions: which are kept, which serve, and what was decided about them.

Each method is one transaction, safe between threads and processes; repeating one that succeeded changes
nothing. The registry stores no weights: their holder keeps those of `pinned`, and publishes a rollback as a
new version (`record_rollback`).

    with Registry.open("sqlite:///runs/NAME/registry.sqlite", migrate=True) as registry:
        registry.register(NewVersion(policy="default", version=7, ...), by="learner")
        registry.promote("default", 7, "best so far", by="operator/ada", to=Status.CANARY, canary_share=0.1)
        route(registry.arms("default"), client_key)
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.registry import feedback, models, ratings, traffic, versions
from penstock.registry.canary import Bounds, Seen, Trial, TrialState
from penstock.registry.database import REGISTRY, Database
from penstock.registry.feedback import Feedback
from penstock.registry.models import EventRow, TrafficRow, VersionRow
from penstock.registry.ratings import KeptRating, RatedConversation, Rating, RatingBounds, Tally
from penstock.registry.records import (
    MAX_EVENTS,
    Evaluation,
    Event,
    NewVersion,
    PolicyVersion,
    SchemaMismatch,
    Status,
    Traffic,
    is_writable,
)
from penstock.registry.routing import Arms
from penstock.registry.versions import RolledBack

T = TypeVar("T")


class Registry:
    """An open registry; build it with `open`. Every method may raise Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
        """Close all connections."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ versions

    def register(self, new: NewVersion, *, by: str, make_room: bool = False) -> PolicyVersion:
        """Register a version as candidate; returns the existing record when it is registered already.

        make_room: retire the least valuable candidate or rolled back version when MAX_PINNED are kept.
        Raises DifferentBytes where the number is taken, TooManyPinned, Conflict.
        """
        return self._write(lambda session: versions.register(session, new, by=by, make_room=make_room))

    def reserve(self, policy: str, run: str) -> int:
        """Reserve RANGE numbers for the versions of a run; returns the lowest, the same again for the run."""
        return self._database.write(lambda session: versions.reserve(session, policy, run))

    def name(self, policy: str, version: int, label: str) -> None:
        """Give a version a name that it keeps for good; NotAllowed for one that another version has."""
        self._database.write(lambda session: traffic.name(session, policy, version, label))

    def labels(self, policy: str) -> Mapping[str, int]:
        """Return the numbers of versions by their names, those of the newest versions."""
        return self._database.read(lambda session: traffic.labels(session, policy))

    def number(self, policy: str, label: str) -> int:
        """Return the number of the version that has a name; raises UnknownVersion."""
        return self._database.read(lambda session: traffic.labelled(session, policy, label))

    def record_evaluation(
        self, policy: str, version: int, evaluation: Evaluation, *, by: str
    ) -> PolicyVersion:
        """Record the evaluation of a version in place of the one before; raises UnknownVersion."""
        return self._write(
            lambda session: versions.record_evaluation(session, policy, version, evaluation, by=by)
        )

    def get(self, policy: str, version: int) -> PolicyVersion:
        """Return a version; raises UnknownVersion."""
        return self._database.read(
            lambda session: models.version_record(models.find(session, policy, version))
        )

    def list(self, policy: str, status: Status | None = None) -> tuple[PolicyVersion, ...]:
        """Return a policy's versions, oldest first; `status`: only those with it."""
        wanted = select(VersionRow).where(VersionRow.policy == policy).order_by(VersionRow.version)
        if status is not None:
            wanted = wanted.where(VersionRow.status == status)
        return self._database.read(
            lambda session: tuple(models.version_record(row) for row in session.scalars(wanted))
        )

    def policies(self) -> tuple[str, ...]:
        """Return the names of the policies that have versions, sorted."""
        wanted = select(VersionRow.policy).distinct().order_by(VersionRow.policy)
        return self._database.read(lambda session: tuple(session.scalars(wanted)))

    def pinned(self, policy: str) -> tuple[PolicyVersion, ...]:
        """Return the versions whose weights must be held, at most MAX_PINNED, oldest first."""
        return self._database.read(
            lambda session: tuple(models.version_record(row) for row in models.pinned(session, policy))
        )

    def active(self, policy: str) -> PolicyVersion | None:
        """Return the active version, None where there is none."""
        return self._one(lambda session: models.with_status(session, policy, Status.ACTIVE))

    def canary(self, policy: str) -> PolicyVersion | None:
        """Return the canary, None where there is none."""
        return self._one(lambda session: models.with_status(session, policy, Status.CANARY))

    def standby(self, policy: str) -> PolicyVersion | None:
        """Return the version that a rollback of the active one makes active again, or None."""
        return self._one(lambda session: models.standby(session, policy))

    # ------------------------------------------------------------ transitions

    def promote(
        self,
        policy: str,
        version: int,
        reason: str,
        *,
        by: str,
        to: Status = Status.ACTIVE,
        canary_share: float | None = None,
    ) -> PolicyVersion:
        """Make a version canary or active; the old active version becomes the standby.

        canary_share: share of clients in [0, 1] that the canary gets; None: unchanged. Raises UnknownVersion,
        NotAllowed where its status does not admit the change, Conflict.
        """
        return self._write(
            lambda session: versions.promote(
                session, policy, version, to, reason=reason, by=by, canary_share=canary_share
            )
        )

    def rollback(self, policy: str, reason: str, *, by: str, version: int | None = None) -> RolledBack:
        """Withdraw the canary, or the active version in favour of its standby: no client gets it any more.

        version: None: the canary if there is one, else the active version. A caller that has judged a version
        must name it: then the second of two such callers changes nothing. Raises UnknownVersion, Conflict,
        NotAllowed where it is neither canary nor active or has no standby.
        """
        return self._database.write(
            lambda session: versions.rollback(session, policy, version, reason=reason, by=by)
        )

    def awaiting_number(self, policy: str) -> PolicyVersion | None:
        """Return the active version where a rollback made it active again and its content has no new number.

        A process that may draw version numbers publishes the content again and calls `record_rollback`.
        """
        return self._one(lambda session: versions.awaiting_number(session, policy))

    def record_rollback(
        self,
        policy: str,
        *,
        version: int,
        restores: int,
        reason: str,
        by: str,
        sha256: str | None = None,
        size_bytes: int | None = None,
    ) -> PolicyVersion:
        """Register `version`, published with the content of the pinned version `restores`.

        It becomes active where `restores` is, which is then retired; otherwise it is a candidate. sha256,
        size_bytes: of the new bytes where they differ from the old ones. Raises UnknownVersion,
        DifferentBytes, Conflict, NotAllowed where `restores` is not pinned.
        """
        return self._write(
            lambda session: versions.record_rollback(
                session,
                policy,
                version,
                restores,
                reason=reason,
                by=by,
                sha256=sha256,
                size_bytes=size_bytes,
            )
        )

    def retire(self, policy: str, version: int, reason: str, *, by: str) -> PolicyVersion:
        """Release a version's weights, also of the standby; not while it is active or traffic names it."""
        return self._write(lambda session: versions.retire(session, policy, version, reason=reason, by=by))

    # ------------------------------------------------------------ traffic and audit

    def traffic(self, policy: str) -> Traffic:
        """Return the policy's traffic."""
        return self._database.read(
            lambda session: models.traffic_record(policy, session.get(TrafficRow, policy))
        )

    def set_traffic(self, wanted: Traffic, reason: str, *, by: str) -> Traffic:
        """Replace the traffic that was read, with `replace(registry.traffic(policy), canary_share=0.1)`.

        Raises Conflict where it was changed since, NotAllowed for a share without a canary or a version that
        is not held.
        """
        return self._database.write(
            lambda session: traffic.set_traffic(session, wanted, reason=reason, by=by)
        )

    def arms(self, policy: str) -> Arms:
        """Return traffic and arms as they are together at one moment, for `routing`."""
        return self._database.read(lambda session: traffic.arms(session, policy))

    def events(self, policy: str, limit: int = 100) -> tuple[Event, ...]:
        """Return the newest events of a policy, newest first; raises ValueError for a limit out of range."""
        if not 1 <= limit <= MAX_EVENTS:
            raise ValueError(f"limit={limit}: must be between 1 and {MAX_EVENTS}")
        wanted = select(EventRow).where(EventRow.policy == policy).order_by(EventRow.number.desc())
        return self._database.read(
            lambda session: tuple(models.event_record(row) for row in session.scalars(wanted.limit(limit)))
        )

    def judge(self, policy: str, trial: Trial, bounds: Bounds, seen: Sequence[Seen]) -> TrialState | None:
        """Return the state of a canary's trial after what one server has seen, judged for all of them.

        None where another trial, or none, is on by now. Who finds WITHDRAW calls `rollback`. seen: returns of
        clients and windows of answers, in order.
        """
        return self._database.write(lambda session: traffic.judge(session, policy, trial, bounds, seen))

    def trial(self, policy: str) -> tuple[Trial | None, TrialState | None]:
        """Return the trial of a canary that is on, and what all servers have found so far; or None."""
        return self._database.read(lambda session: traffic.look(session, policy))

    # ------------------------------------------------------------ feedback

    def add_feedback(
        self,
        policy: str,
        rewards: Sequence[tuple[str, int, float]],
        *,
        caller: str = "",
        request_keys: Sequence[str | None] | None = None,
    ) -> None:
        """Store rewards (episode id, step, amount) that arrived too late for training, all or none.

        caller: who reports them; the oldest of a caller's rewards give way to its newest. request_keys: under
        which each is stored once for its policy. Raises ValueError, NotAllowed for a key of another reward.
        """
        self._database.write(
            lambda session: feedback.add(session, policy, rewards, caller=caller, request_keys=request_keys)
        )

    def delete_feedback(self, project: str, caller: str) -> int:
        """Delete every late reward that a caller reported for policies `PROJECT/…`; returns how many."""
        return self._database.write(lambda session: feedback.delete_of(session, project, caller))

    def feedback(self, policy: str, after: int = 0, limit: int = 1000) -> tuple[Feedback, ...]:
        """Return late rewards of a policy behind number `after`, oldest first, at most `limit`."""
        return self._database.read(lambda session: feedback.read(session, policy, after, limit))

    def add_ratings(
        self, policy: str, new: Sequence[Rating], bounds: RatingBounds | None = None
    ) -> tuple[KeptRating, ...]:
        """Store ratings of responses of a policy, all or none; each `request_key` counts once.

        bounds: of the ratings' projects. Raises NotAllowed for a key of another rating, NoRoom.
        """
        return self._database.write_together(lambda session: ratings.add(session, policy, new, bounds))

    def rating_numbers(self, project: str, rater: str) -> Mapping[str, Sequence[int]]:
        """Return the numbers of a rater's ratings in a project, by policy."""
        return self._database.read(lambda session: ratings.numbers_of(session, project, rater))

    def delete_ratings(self, project: str, rater: str) -> Mapping[str, Sequence[int]]:
        """Delete every rating of a rater in a project, and return the numbers that they had, by policy."""
        return self._database.write(lambda session: ratings.delete(session, project, rater))

    def ratings(
        self,
        policy: str | None = None,
        after: int = 0,
        limit: int = 1000,
        *,
        most_chars: int | None = None,
    ) -> tuple[KeptRating, ...]:
        """Return ratings behind number `after`, oldest first, of all policies when None, at most `limit`.

        most_chars: of their texts together, beyond which no further one is returned; the first always is.
        """
        return self._database.read(lambda session: ratings.read(session, policy, after, limit, most_chars))

    def tally(self, policy: str, key: str, *, above: float, without: str | None = None) -> tuple[Tally, ...]:
        """Return how many conversations of each version were rated in an aspect, and how many above a score.

        without: source whose ratings are left out.
        """
        return self._database.read(lambda session: ratings.tally(session, policy, key, above, without))

    def rated_conversations(
        self, policy: str, key: str, *, above: float, without: str | None = None
    ) -> tuple[RatedConversation, ...]:
        """Return the conversations of a policy that were rated in an aspect, by their names; see `tally`."""
        return self._database.read(
            lambda session: ratings.rated_conversations(session, policy, key, above, without)
        )

    def _one(self, find: Callable[[Session], VersionRow | None]) -> PolicyVersion | None:
        def work(session: Session) -> PolicyVersion | None:
            row = find(session)
            return None if row is None else models.version_record(row)

        return self._database.read(work)

    def _write(self, change: Callable[[Session], VersionRow]) -> PolicyVersion:
        return self._database.write(lambda session: models.version_record(change(session)))
