"""How many ratings a project has, and of how much text: counted as they come and go, so that it is bounded.

A count of the rows themselves would look at all of them for each that comes. Ratings of no project are not
counted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import update
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


def count(session: Session, rows: Sequence[RatingRow], bounds: RatingBounds | None) -> None:
    """Count rows that have just been stored; raises NoRoom where a project has more than it may then.

    It is the last of its transaction: all who rate in a project wait from here on until that ends.
    """
    for project in sorted({row.project for row in rows} - {""}):
        own = [row.text_bytes for row in rows if row.project == project]
        ratings, text_bytes = _change(session, project, len(own), sum(own))
        if bounds is not None and ratings > bounds.ratings:
            raise NoRoom("ratings", bounds.ratings)
        if bounds is not None and text_bytes > bounds.text_bytes:
            raise NoRoom("text_bytes", bounds.text_bytes)


def discount(session: Session, project: str, ratings: int, text_bytes: int) -> None:
    """Count ratings of a project no more that are deleted."""
    if project and ratings:
        _change(session, project, -ratings, -text_bytes)


def _change(session: Session, project: str, ratings: int, text_bytes: int) -> tuple[int, int]:
    """Add to what a project has, in one statement, and return what it has then."""
    row = RatingUsageRow
    changed = update(row).where(row.project == project)
    changed = changed.values(ratings=row.ratings + ratings, text_bytes=row.text_bytes + text_bytes)
    found = session.execute(changed.returning(row.ratings, row.text_bytes)).one_or_none()
    if found is not None:
        return found[0], found[1]
    session.add(RatingUsageRow(project=project, ratings=ratings, text_bytes=text_bytes))
    session.flush()  # where another one was first, the transaction begins again
    return ratings, text_bytes
