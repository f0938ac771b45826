"""Who did what: rows in the transaction of what they tell.

What is done elsewhere has its row before it is done, which is taken back where it was refused: then nothing
was done. No other row is ever taken back or changed.
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
    """Return whether there is a row already of what somebody asks for again under the same `request`."""
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


# ---- How much a project may have stored at a time: who belongs to it could fill the disk of everybody
# else.

_REMEDIES: Final = {
    "ratings": "delete those of a rater",
    "feedback_mib": "delete the ratings of a rater",
    "links": "revoke those that are done with, which gives room a day later",
    "invitations": "wait until some have been used or have expired, for a day",
    "tokens": "revoke those that are not needed",
    "conversations": "tell those of fewer conversations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The most that a project may have.

    feedback_mib: text of its ratings, in MiB. links, invitations: until a day after they have ended. tokens:
    that count. conversations: that were told of its agents.
    """

    ratings: int = 1_000_000
    feedback_mib: int = 4096
    links: int = 5000
    invitations: int = 1000
    tokens: int = 1000
    conversations: int = 1_000_000

    @classmethod
    def of(cls, said: Sequence[str]) -> Self:
        """Return the quotas that are said as NAME=NUMBER, others by default; raises ConfigurationError."""
        known, found = [one.name for one in fields(cls)], dict[str, int]()
        for one in said:
            name, _, number = one.partition("=")
            if name not in known or not (number.isascii() and number.isdigit() and len(number) <= 15):
                raise ConfigurationError(
                    f"--quota {one}: write NAME=NUMBER, with one of the names {', '.join(known)}"
                )
            found[name] = int(number)
        return cls(**found)

    def check(self, name: str, there: int, more: int = 1) -> None:
        """Raise QuotaReached where a project that has so many may not have more. name: of a field."""
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
