"""Rewards that arrived too late for training, stored for a reward model under (episode id, step).

A row has a fixed size, whatever its caller sends. Each caller keeps so many rows and pushes out only its own.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from penstock.registry.models import FeedbackRow
from penstock.registry.records import check_number

MAX_KEPT: Final = 1_000_000
"""Bound over all policies and callers together; the oldest are removed first."""
MAX_KEPT_PER_CALLER: Final = 250_000
"""About 30 MB on disk."""
MAX_EPISODE_ID_LENGTH: Final = 48


class Feedback(NamedTuple):
    """One late reward. number: rises, never used twice."""

    number: int
    episode: str
    step: int
    amount: float
    time: datetime


def add(
    session: Session, policy: str, rewards: Sequence[tuple[str, int, float]], *, caller: str = ""
) -> None:
    """Store rewards (episode id, step, amount) of a caller; raises ValueError for one out of bounds."""
    now, digest = datetime.now(UTC), sha256(caller.encode()).hexdigest()[:16]
    for reward in rewards:
        _check(*reward)
    session.add_all(
        FeedbackRow(policy=policy, episode=episode, step=step, amount=amount, time=now, caller=digest)
        for episode, step, amount in rewards
    )
    session.flush()
    _trim(session, digest)


def read(session: Session, policy: str, after: int, limit: int) -> tuple[Feedback, ...]:
    """Return rewards behind number `after`, oldest first, at most `limit`."""
    wanted = select(FeedbackRow).where(FeedbackRow.policy == policy, FeedbackRow.number > after)
    rows = session.scalars(wanted.order_by(FeedbackRow.number).limit(limit))
    return tuple(Feedback(row.number, row.episode, row.step, row.amount, row.time) for row in rows)


def _check(episode: str, step: int, amount: float) -> None:
    if not 1 <= len(episode) <= MAX_EPISODE_ID_LENGTH:
        raise ValueError(
            f"episode id {episode[:80]!r} of {len(episode)} characters: 1 to {MAX_EPISODE_ID_LENGTH}"
        )
    check_number("step", step)
    if not math.isfinite(amount):
        raise ValueError(f"amount={amount}: must be finite")


def _trim(session: Session, digest: str) -> None:
    """Remove the oldest of all, then of this caller; nothing is counted while the table is small."""
    newest = session.scalar(select(func.max(FeedbackRow.number))) or 0
    session.execute(delete(FeedbackRow).where(FeedbackRow.number <= newest - MAX_KEPT))
    oldest = session.scalar(select(func.min(FeedbackRow.number))) or 0
    if newest - oldest < MAX_KEPT_PER_CALLER:
        return
    own = FeedbackRow.caller == digest
    too_old = select(FeedbackRow.number).where(own).order_by(FeedbackRow.number.desc())
    last = session.scalar(too_old.offset(MAX_KEPT_PER_CALLER).limit(1))
    if last is not None:
        session.execute(delete(FeedbackRow).where(own, FeedbackRow.number <= last))
