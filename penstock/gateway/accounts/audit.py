"""Who did what: rows in the transaction of what they tell.

What is done elsewhere has its row before it is done, which is taken back where it was refused: then nothing
was done. No other row is ever taken back or changed.
"""

from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from penstock.gateway.store.tables import AuditRow

MAX_READ: Final = 500


class AuditEntry(NamedTuple):
    """One row. by: `user/ID`, `token/ID` or `operator` (the command line)."""

    number: int
    time: datetime
    by: str
    action: str
    subject: str
    detail: dict[str, Any]


def note(
    session: Session,
    now: datetime,
    *,
    by: str,
    action: str,
    project: str | None = None,
    subject: str = "",
    **detail: Any,
) -> AuditRow:
    """Add a row, and return it. detail: facts that are neither secrets nor a person's text."""
    row = AuditRow(project=project, by=by, action=action, subject=subject, detail=detail, time=now)
    session.add(row)
    return row


def is_noted(session: Session, *, project: str, action: str, subject: str, request: str) -> bool:
    """Return whether there is a row already of what somebody asks for again under the same `request`."""
    same = (AuditRow.project == project) & (AuditRow.action == action) & (AuditRow.subject == subject)
    again = same & (AuditRow.detail["request"].as_string() == request)
    return session.scalar(select(AuditRow.number).where(again).limit(1)) is not None


def take_back(session: Session, number: int) -> None:
    """Remove the row of what was then refused."""
    session.execute(delete(AuditRow).where(AuditRow.number == number))


def read(session: Session, project: str, *, before: int | None, limit: int) -> tuple[AuditEntry, ...]:
    """Return the newest rows of a project, newest first, those before number `before` where it is given."""
    wanted = select(AuditRow).where(AuditRow.project == project).order_by(AuditRow.number.desc())
    if before is not None:
        wanted = wanted.where(AuditRow.number < before)
    rows = session.scalars(wanted.limit(min(limit, MAX_READ)))
    return tuple(
        AuditEntry(row.number, row.time, row.by, row.action, row.subject, row.detail) for row in rows
    )
