"""Read and replace a policy's traffic, and read its arms in the same view."""

import re
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.registry import models
from penstock.registry.canary import MAX_PART
from penstock.registry.models import LabelRow, TrafficRow
from penstock.registry.records import (
    Action,
    Conflict,
    NotAllowed,
    Status,
    Traffic,
    UnknownVersion,
    check_text,
)
from penstock.registry.routing import Arms

# ---- Names of versions: `v15` is one version of a policy, for good.

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
    """Give a registered version a name; the same again changes nothing."""
    models.find(session, policy, version)
    known = session.get(LabelRow, (policy, check_label(label)))
    if known is None:
        session.add(LabelRow(policy=policy, label=label, version=version))
    elif known.version != version:
        raise NotAllowed(
            f"label={label!r} of policy={policy!r} is that of version {known.version}: choose another"
        )


def read(session: Session, policy: str) -> Mapping[str, int]:
    newest = (
        select(LabelRow).where(LabelRow.policy == policy).order_by(LabelRow.version.desc(), LabelRow.label)
    )
    return {row.label: row.version for row in session.scalars(newest.limit(MAX_READ))}


def number(session: Session, policy: str, label: str) -> int:
    row = session.get(LabelRow, (policy, label))
    if row is None:
        raise UnknownVersion(f"no version of policy={policy!r} is called {label!r}")
    return row.version


def arms(session: Session, policy: str) -> Arms:
    """Return traffic and arms, from one view of the database."""
    held = models.pinned(session, policy)
    by_status = {row.status: row.version for row in held}
    return Arms(
        traffic=models.traffic_record(policy, session.get(TrafficRow, policy)),
        active=by_status.get(Status.ACTIVE),
        canary=by_status.get(Status.CANARY),
        pinned=frozenset(row.version for row in held),
        labels=read(session, policy),
    )


def set_traffic(session: Session, wanted: Traffic, *, reason: str, by: str) -> Traffic:
    """Replace the traffic and return the new one. Raises Conflict, NotAllowed."""
    row = models.traffic_row(session, wanted.policy)
    if _settings(models.traffic_record(wanted.policy, row)) == _settings(wanted):
        return models.traffic_record(wanted.policy, row)
    if row.revision != wanted.revision:
        raise Conflict(
            f"traffic of policy={wanted.policy!r} has revision={row.revision}, not {wanted.revision}: "
            "it was changed in between; read it again and decide on that"
        )
    check_text("reason", reason)
    _check_versions(arms(session, wanted.policy), wanted)
    for name, value in _settings(wanted).items():
        setattr(row, name, value)
    models.raise_revision(row)
    detail = {**_settings(wanted), "revision": row.revision}
    models.audit(session, wanted.policy, None, Action.TRAFFIC, by=by, reason=reason, detail=detail)
    return models.traffic_record(wanted.policy, row)


def check_canary_share(session: Session, policy: str, to: Status, share: float | None) -> None:
    """Raise ValueError or NotAllowed unless a new canary may have this share beside that of `latest`."""
    if share is None:
        return
    if to is not Status.CANARY:
        raise ValueError(f"canary_share={share}: only with to='canary', not {to.value!r}")
    latest = models.traffic_record(policy, session.get(TrafficRow, policy)).latest_share
    _check_judged(Traffic(policy=policy, canary_share=share, latest_share=latest))


def _check_judged(wanted: Traffic) -> None:
    """Raise NotAllowed for a canary that hardly anybody could be compared with."""
    rest = 1.0 - wanted.latest_share
    if wanted.canary_share > MAX_PART * rest + 1e-12:
        raise NotAllowed(
            f"canary_share={wanted.canary_share}: leaves too few clients of the active version to "
            f"compare it with; at most {MAX_PART * rest:.3g} beside latest_share={wanted.latest_share}, or "
            "promote it to active"
        )


def _check_versions(now: Arms, wanted: Traffic) -> None:
    policy = wanted.policy
    if wanted.canary_share > 0 and now.canary is None:
        raise NotAllowed(
            f"canary_share={wanted.canary_share}: policy={policy!r} has no canary: promote a version to "
            "canary first"
        )
    _check_judged(wanted)
    named = {**wanted.pins, **({} if wanted.shadow is None else {"shadow": wanted.shadow})}
    for who, version in named.items():
        if version not in now.pinned:
            held = ", ".join(map(str, sorted(now.pinned))) or "none"
            raise NotAllowed(
                f"version={version} of policy={policy!r} for {who!r} is not held: choose one of {held}"
            )


def _settings(traffic: Traffic) -> dict[str, Any]:
    return {
        "experiment": traffic.experiment,
        "canary_share": traffic.canary_share,
        "latest_share": traffic.latest_share,
        "shadow": traffic.shadow,
        "pins": dict(traffic.pins),
    }
