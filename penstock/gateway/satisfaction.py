"""How content people are with each version of an agent, over all its conversations, rated or not.

People rate what moves them: of those who rate, more are content or cross than of those who do not. So a
version is judged by the thumbs-up among all conversations that it had, with the share that was rated beside
it, and not at all below LEAST conversations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from penstock.gateway.store.tables import ConversationRow, ProjectUsageRow
from penstock.registry.ratings import Tally

LEAST: Final = 30
"""Fewest conversations of a version by which it is judged."""
THUMB: Final = 0.5
"""A score above it is a thumb up."""
_Z: Final = 1.959964
"""Of an interval that holds the true share in 95 of 100 cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Satisfaction:
    """Says what the conversations of a version came to.

    share, low, high: of thumbs-up among all of them, with the interval of 95 % (Wilson); None: cannot tell.
    """

    version: int
    conversations: int
    rated: int
    thumbs_up: int
    share: float | None
    low: float | None
    high: float | None


def satisfaction(told: Mapping[int, int], tallies: Sequence[Tally]) -> list[Satisfaction]:
    """Return the satisfaction with each version, newest first.

    told: how many conversations each version had, of the versions of which that was told at all.
    """
    rated = {one.version: one for one in tallies}
    return [
        _judged(version, told.get(version, 0), rated.get(version, Tally(version=version, rated=0, well=0)))
        for version in sorted(told.keys() | rated.keys(), reverse=True)
    ]


def share_of(count: int, of: int) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return a share and its interval of 95 % (Wilson); None each below LEAST, where one cannot tell."""
    return (None, None, None) if of < LEAST else _interval(count, of)


def note(session: Session, project: str, agent: str, version: int, conversations: Sequence[str]) -> int:
    """Store that a version had these conversations, each once; returns how many are new."""
    row = ConversationRow
    own = (row.project == project) & (row.agent == agent) & (row.version == version)
    names = set(conversations)
    new = names - set(session.scalars(select(row.conversation).where(own & row.conversation.in_(names))))
    session.add_all(
        row(project=project, agent=agent, version=version, conversation=name) for name in sorted(new)
    )
    return len(new)


def told_before(session: Session, project: str, more: int) -> int:
    """Count `more` conversations of a project that are told now, and return how many there were before."""
    usage = session.get(ProjectUsageRow, project)
    if usage is None:
        usage = ProjectUsageRow(project=project, conversations=0)
        session.add(usage)
    before, usage.conversations = usage.conversations, usage.conversations + more
    return before


def counts(session: Session, project: str, agent: str) -> dict[int, int]:
    """Return how many conversations each version of an agent had."""
    row = ConversationRow
    counted = select(row.version, func.count()).where((row.project == project) & (row.agent == agent))
    return dict(session.execute(counted.group_by(row.version)).all())


def _judged(version: int, told: int, tally: Tally) -> Satisfaction:
    every = max(told, tally.rated) if told else 0
    share, low, high = share_of(tally.well, every)
    return Satisfaction(
        version=version,
        conversations=every,
        rated=tally.rated,
        thumbs_up=tally.well,
        share=share,
        low=low,
        high=high,
    )


def _interval(count: int, of: int) -> tuple[float, float, float]:
    """Return the share, and the least and the greatest that it may be (Wilson 1927)."""
    share, spread = count / of, _Z**2 / of
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return share, max(0.0, middle - half), min(1.0, middle + half)
