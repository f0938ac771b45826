"""Rewards that arrived too late for training, stored for a reward model under (episode id, step).

The size of a row does not depend on what its caller sends. The number of rows of each caller is bounded: its
newest rewards replace its own oldest ones. Where the table is full, rows of the largest project are removed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from penstock.registry.models import FeedbackRow
from penstock.registry.records import NotAllowed, check_number

MAX_KEPT: Final = 1_000_000
"""Most rows of the table; the oldest ones of the largest project are removed first."""
MAX_KEPT_PER_CALLER: Final = 250_000
"""Most rows of one caller, about 30 MB on disk."""
MAX_EPISODE_ID_LENGTH: Final = 48


class Feedback(NamedTuple):
    """One late reward. number: rises, is never reused."""

    number: int
    episode: str
    step: int
    amount: float
    time: datetime


def add(
    session: Session,
    policy: str,
    rewards: Sequence[tuple[str, int, float]],
    *,
    caller: str = "",
    request_keys: Sequence[str | None] | None = None,
) -> None:
    """Store rewards (episode id, step, amount) that arrived too late for training, all or none.

    caller: who reports them; a caller's newest rewards replace its oldest ones. request_keys: one for each
    reward; a policy stores a reward with the same key once. Raises ValueError, NotAllowed for a key of
    another reward.
    """
    now, digest = datetime.now(UTC), _digest(caller)
    for reward in rewards:
        _check(*reward)
    keys = request_keys or [None] * len(rewards)
    for (episode, step, amount), key in zip(rewards, keys, strict=True):
        row = FeedbackRow(policy=policy, episode=episode, step=step, amount=amount, time=now, caller=digest)
        if key is None or not _is_known(session, row, key):
            row.request_key = key
            session.add(row)
    session.flush()
    _trim(session, digest)


def delete_of(session: Session, project: str, caller: str) -> int:
    """Delete the late rewards that a caller reported for policies `PROJECT/…`; returns their number."""
    count = count_of(session, project, caller)
    session.execute(delete(FeedbackRow).where(_own(project, caller)))
    return count


def count_of(session: Session, project: str, caller: str) -> int:
    """Return the number of late rewards that a caller reported for policies `PROJECT/…`."""
    own = _own(project, caller)
    return session.scalar(select(func.count()).select_from(FeedbackRow).where(own)) or 0


def read(session: Session, policy: str, after: int = 0, limit: int = 1000) -> tuple[Feedback, ...]:
    """Return the late rewards of a policy after number `after`, oldest first, at most `limit`."""
    wanted = select(FeedbackRow).where(FeedbackRow.policy == policy, FeedbackRow.number > after)
    rows = session.scalars(wanted.order_by(FeedbackRow.number).limit(limit))
    return tuple(Feedback(row.number, row.episode, row.step, row.amount, row.time) for row in rows)


def _own(project: str, caller: str) -> ColumnElement[bool]:
    of_project = FeedbackRow.policy.startswith(f"{project}/", autoescape=True)
    return of_project & (FeedbackRow.caller == _digest(caller))


def _digest(caller: str) -> str:
    return sha256(caller.encode()).hexdigest()[:16]


def _is_known(session: Session, row: FeedbackRow, key: str) -> bool:
    """Return whether the reward is stored already; raises NotAllowed where its key has another one."""
    same = (FeedbackRow.policy == row.policy) & (FeedbackRow.request_key == key)
    known = session.scalar(select(FeedbackRow).where(same))  # of this transaction, too: it flushes first
    if known is None:
        return False
    if (known.episode, known.step, known.amount) != (row.episode, row.step, row.amount):
        raise NotAllowed("this key came with another late reward before: a new one needs a key of its own")
    return True


def _check(episode: str, step: int, amount: float) -> None:
    if not 1 <= len(episode) <= MAX_EPISODE_ID_LENGTH:
        raise ValueError(
            f"episode id {episode[:80]!r} of {len(episode)} characters: 1 to {MAX_EPISODE_ID_LENGTH}"
        )
    check_number("step", step)
    if not math.isfinite(amount):
        raise ValueError(f"amount={amount}: must be finite")


def _trim(session: Session, digest: str) -> None:
    """Remove rows of the largest project, then the oldest of this caller; a small table is not counted."""
    newest = session.scalar(select(func.max(FeedbackRow.number))) or 0
    oldest = session.scalar(select(func.min(FeedbackRow.number))) or 0
    if newest - oldest >= MAX_KEPT:
        _make_room(session)
    if newest - oldest < MAX_KEPT_PER_CALLER:
        return
    own = FeedbackRow.caller == digest
    too_old = select(FeedbackRow.number).where(own).order_by(FeedbackRow.number.desc())
    last = session.scalar(too_old.offset(MAX_KEPT_PER_CALLER).limit(1))
    if last is not None:
        session.execute(delete(FeedbackRow).where(own, FeedbackRow.number <= last))


def _make_room(session: Session) -> None:
    """Remove 1 % more than necessary, so that not every new row counts the rows of all projects."""
    count = session.scalar(select(func.count()).select_from(FeedbackRow)) or 0
    too_many = count - MAX_KEPT
    if too_many <= 0:
        return
    too_many += MAX_KEPT // 100
    rows = Counter[str]()
    for policy, number in session.execute(
        select(FeedbackRow.policy, func.count()).group_by(FeedbackRow.policy)
    ):
        rows[policy.partition("/")[0]] += number
    for project, number in rows.most_common():
        if too_many <= 0:
            return
        own = (FeedbackRow.policy == project) | FeedbackRow.policy.startswith(f"{project}/", autoescape=True)
        oldest = select(FeedbackRow.number).where(own).order_by(FeedbackRow.number)
        last = session.scalar(oldest.offset(min(too_many, number) - 1).limit(1))
        session.execute(delete(FeedbackRow).where(own, FeedbackRow.number <= last))
        too_many -= number
