"""Who did what: rows that are only added, in the transaction of what they tell."""

from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from gateway.store.tables import AuditRow

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
) -> None:
    """Add a row. detail: facts that are neither secrets nor a person's text."""
    session.add(AuditRow(project=project, by=by, action=action, subject=subject, detail=detail, time=now))


def read(session: Session, project: str, *, before: int | None, limit: int) -> tuple[AuditEntry, ...]:
    """Return the newest rows of a project, newest first, those before number `before` where it is given."""
    wanted = select(AuditRow).where(AuditRow.project == project).order_by(AuditRow.number.desc())
    if before is not None:
        wanted = wanted.where(AuditRow.number < before)
    rows = session.scalars(wanted.limit(min(limit, MAX_READ)))
    return tuple(
        AuditEntry(row.number, row.time, row.by, row.action, row.subject, row.detail) for row in rows
    )
