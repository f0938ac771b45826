"""Names of versions: `v15` is one version of a policy, for good.

A name begins with a letter, so that it is never taken for a number, and is none of the arms' own names.
"""

import re
from collections.abc import Mapping
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.registry import rows
from penstock.registry.models import LabelRow
from penstock.registry.registry_errors import NotAllowed, UnknownVersion

MAX_READ: Final = 1000
"""Most names of a policy that are read at once, those of the newest versions."""
_FORM: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_TAKEN: Final = frozenset({"active", "canary", "latest", "pinned", "previous"})


def check_label(label: str) -> str:
    """Return a name of a version; raises ValueError for what cannot be one."""
    if not _FORM.fullmatch(label) or label in _TAKEN:
        raise ValueError(
            f"label={label!r}: 1 to 63 letters, digits, '.', '_' and '-', a letter first, no name of an arm"
        )
    return label


def name(session: Session, policy: str, version: int, label: str) -> None:
    """Give a registered version a name; the same again changes nothing.

    Raises UnknownVersion, and NotAllowed for a name that another version has.
    """
    rows.find(session, policy, version)
    known = session.get(LabelRow, (policy, check_label(label)))
    if known is None:
        session.add(LabelRow(policy=policy, label=label, version=version))
    elif known.version != version:
        raise NotAllowed(
            f"label={label!r} of policy={policy!r} is that of version {known.version}: choose another"
        )


def read(session: Session, policy: str) -> Mapping[str, int]:
    """Return the numbers by the names."""
    newest = (
        select(LabelRow).where(LabelRow.policy == policy).order_by(LabelRow.version.desc(), LabelRow.label)
    )
    return {row.label: row.version for row in session.scalars(newest.limit(MAX_READ))}


def number(session: Session, policy: str, label: str) -> int:
    """Return the version that has a name; raises UnknownVersion."""
    row = session.get(LabelRow, (policy, label))
    if row is None:
        raise UnknownVersion(f"no version of policy={policy!r} is called {label!r}")
    return row.version
