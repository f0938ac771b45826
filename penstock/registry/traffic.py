"""A policy's traffic, its arms in the same view, labels of its versions, and the trial of its canary.

Each function runs in the caller's transaction. A client counts once at each level of a trial, on however many
servers and after any restart, because its row is stored.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from penstock.config.sections import CanarySection
from penstock.registry import canary, models, records
from penstock.registry.canary import MAX_PART, ClientReturn, Seen, Trial, TrialState
from penstock.registry.models import LabelRow, TrafficRow, TrialClientRow, TrialRow
from penstock.registry.routing import Arms

log = logging.getLogger(__name__)

MAX_LABELS: Final = 1000
"""Most labels of a policy that are read at once, those of the newest versions."""
MAX_CLIENTS: Final = 100_000
"""Most rows of clients and levels in a trial, about 10 MB; further clients are not compared."""
_AT_ONCE: Final = 500
_FORM: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_TAKEN: Final = frozenset({"active", "canary", "latest", "pinned", "previous"})


def name(session: Session, policy: str, version: int, label: str) -> None:
    """Give a version a permanent label; raises NotAllowed for the label of another version."""
    models.find(session, policy, version)
    if not _FORM.fullmatch(label) or label in _TAKEN:
        raise ValueError(
            f"label={label!r}: 1 to 63 letters, digits, '.', '_' and '-', a letter first, no name of an arm"
        )
    known = session.get(LabelRow, (policy, label))
    if known is None:
        session.add(LabelRow(policy=policy, label=label, version=version))
    elif known.version != version:
        raise records.NotAllowed(
            f"label={label!r} of policy={policy!r} is that of version {known.version}: choose another"
        )


def labels(session: Session, policy: str) -> Mapping[str, int]:
    """Return version numbers by label, those of the newest versions."""
    newest = (
        select(LabelRow).where(LabelRow.policy == policy).order_by(LabelRow.version.desc(), LabelRow.label)
    )
    return {row.label: row.version for row in session.scalars(newest.limit(MAX_LABELS))}


def labelled(session: Session, policy: str, label: str) -> int:
    """Return the number of the version with a label; raises UnknownVersion."""
    row = session.get(LabelRow, (policy, label))
    if row is None:
        raise records.UnknownVersion(f"no version of policy={policy!r} is called {label!r}")
    return row.version


def current(session: Session, policy: str) -> records.Traffic:
    return models.traffic_record(policy, session.get(TrafficRow, policy))


def arms(session: Session, policy: str) -> Arms:
    """Return traffic and arms in one consistent view, for `routing`."""
    held = models.pinned(session, policy)
    by_status = {row.status: row.version for row in held}
    return Arms(
        traffic=current(session, policy),
        active=by_status.get(records.Status.ACTIVE),
        canary=by_status.get(records.Status.CANARY),
        pinned=frozenset(row.version for row in held),
        labels=labels(session, policy),
    )


def set_traffic(session: Session, wanted: records.Traffic, reason: str, *, by: str) -> records.Traffic:
    """Replace the traffic, with `replace(registry.traffic(policy), canary_share=0.1)`.

    Raises Conflict where it has changed since it was read, NotAllowed for a share without a canary and for a
    version whose weights are not kept.
    """
    row = models.traffic_row(session, wanted.policy)
    if _settings(models.traffic_record(wanted.policy, row)) == _settings(wanted):
        return models.traffic_record(wanted.policy, row)
    if row.revision != wanted.revision:
        raise records.Conflict(
            f"traffic of policy={wanted.policy!r} has revision={row.revision}, not {wanted.revision}: "
            "it was changed in between; read it again and decide on that"
        )
    records.check_text("reason", reason)
    _check_versions(arms(session, wanted.policy), wanted)
    for name, value in _settings(wanted).items():
        setattr(row, name, value)
    models.raise_revision(row)
    detail = {**_settings(wanted), "revision": row.revision}
    models.audit(session, wanted.policy, None, records.Action.TRAFFIC, by=by, reason=reason, detail=detail)
    return models.traffic_record(wanted.policy, row)


def check_canary_share(session: Session, policy: str, to: records.Status, share: float | None) -> None:
    """Raise ValueError or NotAllowed unless a new canary may have this share of clients."""
    if share is None:
        return
    if to is not records.Status.CANARY:
        raise ValueError(f"canary_share={share}: only with to='canary', not {to.value!r}")
    latest = current(session, policy).latest_share
    _check_judged(records.Traffic(policy=policy, canary_share=share, latest_share=latest))


def _check_judged(wanted: records.Traffic) -> None:
    """Raise NotAllowed for a share that leaves too few clients to compare the canary with."""
    rest = 1.0 - wanted.latest_share
    if wanted.canary_share > MAX_PART * rest + 1e-12:
        raise records.NotAllowed(
            f"canary_share={wanted.canary_share}: leaves too few clients of the active version to "
            f"compare it with; at most {MAX_PART * rest:.3g} with latest_share={wanted.latest_share}, or "
            "promote it to active"
        )


def _check_versions(now: Arms, wanted: records.Traffic) -> None:
    policy = wanted.policy
    if wanted.canary_share > 0 and now.canary is None:
        raise records.NotAllowed(
            f"canary_share={wanted.canary_share}: policy={policy!r} has no canary: promote a version to "
            "canary first"
        )
    _check_judged(wanted)
    named = {**wanted.pins, **({} if wanted.shadow is None else {"shadow": wanted.shadow})}
    for who, version in named.items():
        if version not in now.pinned:
            held = ", ".join(map(str, sorted(now.pinned))) or "none"
            raise records.NotAllowed(
                f"version={version} of policy={policy!r} for {who!r} is not held: choose one of {held}"
            )


def _settings(traffic: records.Traffic) -> dict[str, Any]:
    names = ("experiment", "canary_share", "latest_share", "shadow")
    return {**{name: getattr(traffic, name) for name in names}, "pins": dict(traffic.pins)}


# ---- The trial of the canary, one for all servers and across restarts. The next trial deletes its state.


def judge(
    session: Session, policy: str, trial: Trial, bounds: CanarySection, seen: Sequence[Seen]
) -> TrialState | None:
    """Add the observations of one server to a canary's trial, and return its new state.

    None where another trial, or none, is running. A caller that receives WITHDRAW calls `rollback`. seen:
    returns of clients and windows of answers, in order.
    """
    if Trial.of(arms(session, policy)) != trial:
        return None
    row = session.get(TrialRow, policy)
    state = _state_of(row, trial)
    if state is None:
        state = TrialState()
        session.execute(delete(TrialClientRow).where(TrialClientRow.policy == policy))
    elif not seen:
        return state
    fresh = _new(session, policy, seen)
    is_full = len(fresh) < len(seen) and _count(session, policy) >= MAX_CLIENTS
    state = replace(canary.observe_all(state, bounds, fresh), is_full=is_full or state.is_full)
    text = canary.to_json(state)
    if row is None:
        session.add(TrialRow(policy=policy, trial=str(trial), state=text, changed=models.now()))
    else:
        row.trial, row.state, row.changed = str(trial), text, models.now()
    return state


def look(session: Session, policy: str) -> tuple[Trial | None, TrialState | None]:
    """Return the running trial of a policy and its state, each None where there is none."""
    trial = Trial.of(arms(session, policy))
    row = session.get(TrialRow, policy)
    return trial, None if trial is None else _state_of(row, trial)


def _state_of(row: TrialRow | None, trial: Trial) -> TrialState | None:
    """Return the stored state of the trial; None where the trial begins."""
    if row is None or row.trial != str(trial):
        return None
    try:
        return canary.from_json(row.state)
    except ValueError as error:
        log.warning("a trial begins anew", extra={"trial": str(trial), "why": str(error)})
        return None


def _new(session: Session, policy: str, seen: Sequence[Seen]) -> list[Seen]:
    """Return the observations without those of clients that were compared before or are too many."""
    named = {(one.client, one.level) for one in seen if isinstance(one, ClientReturn) and one.client}
    known = _known(session, policy, sorted({client for client, _ in named}))
    room = MAX_CLIENTS - _count(session, policy) if named else 0
    fresh: list[Seen] = []
    for one in seen:
        if isinstance(one, ClientReturn) and one.client:
            name = (one.client, one.level)
            if name in known or room <= 0:
                continue
            known.add(name)
            room -= 1
            session.add(TrialClientRow(policy=policy, client=one.client, level=one.level))
        fresh.append(one)
    return fresh


def _known(session: Session, policy: str, clients: list[str]) -> set[tuple[str, int]]:
    known: set[tuple[str, int]] = set()
    for start in range(0, len(clients), _AT_ONCE):
        wanted = select(TrialClientRow.client, TrialClientRow.level).where(
            TrialClientRow.policy == policy, TrialClientRow.client.in_(clients[start : start + _AT_ONCE])
        )
        known.update((client, level) for client, level in session.execute(wanted))
    return known


def _count(session: Session, policy: str) -> int:
    wanted = select(func.count()).select_from(TrialClientRow).where(TrialClientRow.policy == policy)
    return session.scalar(wanted) or 0
