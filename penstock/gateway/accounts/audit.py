"""The audit log: rows in the transaction of the change that they describe.

For an action outside the database the row is written first, and deleted if the action was refused, as nothing
was done then. No other row is ever changed or deleted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, Self

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts.principal import QuotaReached
from penstock.gateway.store.tables import AuditRow
from penstock.protocol.limits import MIB
from penstock.registry.ratings import RatingBounds

MAX_READ: Final = 500


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
    """Return whether there is a row of the same action with this `request`."""
    same = (AuditRow.project == project) & (AuditRow.action == action) & (AuditRow.subject == subject)
    again = same & (AuditRow.detail["request"].as_string() == request)
    return session.scalar(select(AuditRow.number).where(again).limit(1)) is not None


def take_back(session: Session, number: int) -> None:
    session.execute(delete(AuditRow).where(AuditRow.number == number))


def read(session: Session, project: str, *, before: int | None, limit: int) -> tuple[AuditRow, ...]:
    """Return the newest rows of a project, newest first, those before number `before` where it is given."""
    wanted = select(AuditRow).where(AuditRow.project == project).order_by(AuditRow.number.desc())
    if before is not None:
        wanted = wanted.where(AuditRow.number < before)
    return tuple(session.scalars(wanted.limit(min(limit, MAX_READ))))


# ---- Quotas of a project, so that its members cannot fill the disk that all projects share.

_REMEDIES: Final = {
    "ratings": "delete those of a rater",
    "feedback_mib": "delete the ratings of a rater",
    "links": "revoke those that are done with, which gives room a day later",
    "invitations": "wait until some have been used or have expired, for a day",
    "tokens": "revoke those that are not needed",
    "conversations": "report fewer conversations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Quotas of each project.

    feedback_mib: text of its ratings, in MiB. links, invitations: including those that ended in the last day.
    tokens: valid ones. conversations: reported for its agents.
    """

    ratings: int = 1_000_000
    feedback_mib: int = 4096
    links: int = 5000
    invitations: int = 1000
    tokens: int = 1000
    conversations: int = 1_000_000

    @classmethod
    def of(cls, options: Sequence[str]) -> Self:
        """Return the quotas of options NAME=NUMBER, defaults for others; raises ConfigurationError."""
        known, found = [one.name for one in fields(cls)], dict[str, int]()
        for one in options:
            name, _, number = one.partition("=")
            if name not in known or not (number.isascii() and number.isdigit() and len(number) <= 15):
                raise ConfigurationError(
                    f"--quota {one}: write NAME=NUMBER, with one of the names {', '.join(known)}"
                )
            found[name] = int(number)
        return cls(**found)

    def check(self, name: str, there: int, more: int = 1) -> None:
        """Raise QuotaReached where `more` in addition to those `there` exceed a quota. name: of a field."""
        if there + more > getattr(self, name):
            raise self.reached(name)

    def reached(self, name: str) -> QuotaReached:
        most = getattr(self, name)
        return QuotaReached(
            f"the project has all that it may have (quota {name}: {most}): {_REMEDIES[name]}, or have the "
            f"gateway's operator raise it, --quota {name}=NUMBER"
        )

    def of_ratings(self) -> RatingBounds:
        return RatingBounds(ratings=self.ratings, text_bytes=self.feedback_mib * MIB)
