"""Rewards that arrived too late for training, stored for a reward model under (episode id, step)."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from penstock.registry.models import FeedbackRow

MAX_KEPT: Final = 1_000_000
"""Bound over all policies together; the oldest are removed first."""


class Feedback(NamedTuple):
    """One late reward. number: rises, never used twice."""

    number: int
    episode: str
    step: int
    amount: float
    time: datetime


def add(session: Session, policy: str, rewards: Sequence[tuple[str, int, float]]) -> None:
    """Store rewards (episode id, step, amount)."""
    now = datetime.now(UTC)
    session.add_all(
        FeedbackRow(policy=policy, episode=episode, step=step, amount=amount, time=now)
        for episode, step, amount in rewards
    )
    session.flush()
    newest = session.scalar(select(func.max(FeedbackRow.number))) or 0
    session.execute(delete(FeedbackRow).where(FeedbackRow.number <= newest - MAX_KEPT))


def read(session: Session, policy: str, after: int, limit: int) -> tuple[Feedback, ...]:
    """Return rewards behind number `after`, oldest first, at most `limit`."""
    wanted = select(FeedbackRow).where(FeedbackRow.policy == policy, FeedbackRow.number > after)
    rows = session.scalars(wanted.order_by(FeedbackRow.number).limit(limit))
    return tuple(Feedback(row.number, row.episode, row.step, row.amount, row.time) for row in rows)
