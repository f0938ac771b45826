"""Read and replace a policy's traffic, and read its arms in the same view."""

from typing import Any

from sqlalchemy.orm import Session

from penstock.registry import rows, version_labels
from penstock.registry.bounds import MAX_PART
from penstock.registry.models import TrafficRow
from penstock.registry.records import Action, Status, Traffic, check_text
from penstock.registry.registry_errors import Conflict, NotAllowed
from penstock.registry.routing import Arms


def arms(session: Session, policy: str) -> Arms:
    """Return traffic and arms, from one view of the database."""
    held = rows.pinned(session, policy)
    by_status = {row.status: row.version for row in held}
    return Arms(
        traffic=rows.traffic_record(policy, session.get(TrafficRow, policy)),
        active=by_status.get(Status.ACTIVE),
        canary=by_status.get(Status.CANARY),
        pinned=frozenset(row.version for row in held),
        labels=version_labels.read(session, policy),
    )


def set_traffic(session: Session, wanted: Traffic, *, reason: str, by: str) -> Traffic:
    """Replace the traffic and return the new one. Raises Conflict, NotAllowed."""
    row = rows.traffic_row(session, wanted.policy)
    if _settings(rows.traffic_record(wanted.policy, row)) == _settings(wanted):
        return rows.traffic_record(wanted.policy, row)
    if row.revision != wanted.revision:
        raise Conflict(
            f"traffic of policy={wanted.policy!r} has revision={row.revision}, not {wanted.revision}: "
            "it was changed in between; read it again and decide on that"
        )
    check_text("reason", reason)
    _check_versions(arms(session, wanted.policy), wanted)
    for name, value in _settings(wanted).items():
        setattr(row, name, value)
    rows.raise_revision(row)
    detail = {**_settings(wanted), "revision": row.revision}
    rows.audit(session, wanted.policy, None, Action.TRAFFIC, by=by, reason=reason, detail=detail)
    return rows.traffic_record(wanted.policy, row)


def check_canary_share(session: Session, policy: str, to: Status, share: float | None) -> None:
    """Raise ValueError or NotAllowed unless a new canary may have this share beside that of `latest`."""
    if share is None:
        return
    if to is not Status.CANARY:
        raise ValueError(f"canary_share={share}: only with to='canary', not {to.value!r}")
    latest = rows.traffic_record(policy, session.get(TrafficRow, policy)).latest_share
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
    """Return the fields that an operator sets, as the row holds them."""
    return {
        "experiment": traffic.experiment,
        "canary_share": traffic.canary_share,
        "latest_share": traffic.latest_share,
        "shadow": traffic.shadow,
        "pins": dict(traffic.pins),
    }
