"""How many ratings a project has, and of how much text: counted as they come and go, so that it is bounded.

A count of the rows themselves would look at all of them for each that comes. Ratings of no project are not
counted.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy.orm import Session

from penstock.registry.models import RatingRow, RatingUsageRow
from penstock.registry.registry_errors import NoRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingBounds:
    """The most that a project may have. text_bytes: of prompts, responses and notes, as UTF-8."""

    ratings: int
    text_bytes: int


def bytes_of(row: RatingRow) -> int:
    """Return how much text a rating has."""
    prompt = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt)
    return sum(len(text.encode()) for text in (prompt, row.response, row.rejected or "", row.notes))


def count(session: Session, rows: Iterable[RatingRow], bounds: RatingBounds | None) -> None:
    """Count rows that have just been stored; raises NoRoom where a project has more than it may then."""
    for row in rows:
        if row.project:
            _change(session, row.project, 1, row.text_bytes)
    if bounds is None:
        return
    for project in sorted({row.project for row in rows} - {""}):
        usage = session.get_one(RatingUsageRow, project)
        if usage.ratings > bounds.ratings:
            raise NoRoom("ratings", bounds.ratings)
        if usage.text_bytes > bounds.text_bytes:
            raise NoRoom("text_bytes", bounds.text_bytes)


def discount(session: Session, project: str, ratings: int, text_bytes: int) -> None:
    """Count ratings of a project no more that are deleted."""
    if project and ratings:
        _change(session, project, -ratings, -text_bytes)


def _change(session: Session, project: str, ratings: int, text_bytes: int) -> None:
    usage = session.get(RatingUsageRow, project)
    if usage is None:
        usage = RatingUsageRow(project=project, ratings=0, text_bytes=0)
        session.add(usage)
    usage.ratings += ratings
    usage.text_bytes += text_bytes
