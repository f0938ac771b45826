"""Numbers of versions that are reserved for a run, where several runs train one policy.

    1 … RANGE            the first run of the policy
    RANGE + 1 … 2·RANGE  the next one …

A run draws its numbers by itself, and leaps by 2^20 when its Redis was emptied: RANGE has room for that. Two
runs never draw the same number, so that a number names one version of a policy, whichever run trained it.
"""

from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from penstock.registry.models import RangeRow, VersionRow

RANGE: Final = 2**26
"""Numbers that a run has for itself."""


def reserve(session: Session, policy: str, run: str) -> int:
    """Return the lowest number of a run's range; the same again for the same run."""
    known = session.get(RangeRow, (policy, run))
    if known is not None:
        return known.first
    registered = session.scalar(select(func.max(VersionRow.version)).where(VersionRow.policy == policy))
    newest = session.scalar(select(func.max(RangeRow.first)).where(RangeRow.policy == policy))
    used = max(registered or 0, 0 if newest is None else newest + RANGE - 1)
    first = -(-used // RANGE) * RANGE + 1
    session.add(RangeRow(policy=policy, run=run, first=first))
    return first
