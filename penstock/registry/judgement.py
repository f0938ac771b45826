"""The judgement of a canary, kept in the registry: several servers and restarts make one trial.

A trial is a canary, an active version and how clients are told apart from others (experiment, share of
`latest`). Each call is one transaction: what was seen is added to the state that all have made so far. A
client counts once at each level, whichever servers saw it and however often one was restarted, for its row
stands there already. Another trial in its place forgets all of that.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from penstock.registry import canary as canary_trial
from penstock.registry import models, steering
from penstock.registry.canary import Bounds, ClientReturn, Seen, TrialState
from penstock.registry.models import TrialClientRow, TrialRow
from penstock.registry.routing import Arms

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 100_000
"""Most clients and levels of a trial that are remembered, about 10 MB; further ones are not compared."""
_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Names what is compared."""

    canary: int
    active: int
    experiment: str
    latest_share: float

    @classmethod
    def of(cls, arms: Arms) -> Self | None:
        """Return the trial that is on; None without a canary, without others to compare it with."""
        traffic = arms.traffic
        if arms.canary is None or arms.active is None:
            return None
        trial = cls(
            canary=arms.canary,
            active=arms.active,
            experiment=traffic.experiment,
            latest_share=traffic.latest_share,
        )
        return trial if 0.0 < trial.part_of(traffic.canary_share) < 1.0 else None

    def part_of(self, canary_share: float) -> float:
        """Return the chance of the canary among those who are given the canary or the active version."""
        rest = 1.0 - self.latest_share
        return canary_share / rest if rest > 0.0 else 0.0

    def __str__(self) -> str:
        return f"{self.canary} {self.active} {self.experiment} {self.latest_share!r}"


def judge(
    session: Session, policy: str, trial: Trial, bounds: Bounds, seen: Sequence[Seen]
) -> TrialState | None:
    """Return the state of a trial after what was seen, judged for all servers."""
    if Trial.of(steering.arms(session, policy)) != trial:
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
    state = replace(canary_trial.observe_all(state, bounds, fresh), is_full=is_full or state.is_full)
    text = canary_trial.to_json(state)
    if row is None:
        session.add(TrialRow(policy=policy, trial=str(trial), state=text, changed=models.now()))
    else:
        row.trial, row.state, row.changed = str(trial), text, models.now()
    return state


def look(session: Session, policy: str) -> tuple[Trial | None, TrialState | None]:
    trial = Trial.of(steering.arms(session, policy))
    row = session.get(TrialRow, policy)
    return trial, None if trial is None else _state_of(row, trial)


def _state_of(row: TrialRow | None, trial: Trial) -> TrialState | None:
    """Return what is known of the trial; None where it begins."""
    if row is None or row.trial != str(trial):
        return None
    try:
        return canary_trial.from_json(row.state)
    except ValueError as error:
        log.warning("a trial begins anew", extra={"trial": str(trial), "why": str(error)})
        return None


def _new(session: Session, policy: str, seen: Sequence[Seen]) -> list[Seen]:
    """Return what counts: all but clients that were compared at their level before, or are too many."""
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
