"""Whether a run still makes updates, and why not, in words that name what a person must look at."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.log.store_records import SessionRow, Status
from penstock.learner.ledger import Drop
from penstock.protocol.messages import Role
from penstock.runtime.health import Health

UPDATE: Final = "update"
"""What health watches: an update, not the mere arrival of experience that is dropped."""


@dataclass(slots=True, kw_only=True, eq=False)
class StallWatch:
    """Health's watch on updates. status: asks Redis who is there. timeout_s: `learner.stall_timeout_s`."""

    health: Health
    status: Callable[[], Status]
    timeout_s: float
    _dropped: Counter[str] = field(init=False, default_factory=Counter)

    def begin(self) -> None:
        """Watch from now on."""
        self.health.watch(UPDATE, self.timeout_s)

    def expect(self) -> None:
        """An update is waited for."""
        self.health.expect(UPDATE, "")

    def suspend(self) -> None:
        """No update is waited for until `expect`."""
        self.health.suspend(UPDATE)

    def note_dropped(self, reasons: Iterable[Drop]) -> None:
        """Fragments were dropped: one of the causes that `find` may name."""
        for reason in reasons:
            self._dropped[reason.value] += 1

    def note_update(self) -> None:
        """An update was made and applied."""
        self.health.progress(UPDATE)
        self._dropped.clear()

    def find(self) -> str:
        """Why no update was made for `timeout_s`, which turns health red; "" as long as that is not so."""
        if not self.health.has_stalled(UPDATE):
            return ""
        text = cause(self.status(), self._dropped, self.timeout_s)
        self.health.fail(text)
        return text


def cause(status: Status, dropped: Mapping[str, int], limit_s: float) -> str:
    """One line. dropped: fragments by reason since the last update."""
    return f"no update for {limit_s:g} s (learner.stall_timeout_s): {_reason(status, dropped)}"


def _reason(status: Status, dropped: Mapping[str, int]) -> str:
    actors = [row for row in status.sessions if row.role is Role.ROLLOUT]
    if not actors:
        return (
            "all actors are gone, no rollout worker has an open session; their logs say why"
            if status.log_head
            else "no rollout worker has come; start one, or wait longer (learner.stall_timeout_s)"
        )
    found = []
    if dropped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        found.append(f"all that arrived was dropped ({counts})")
    if all(row.applied_version < status.latest.version for row in actors):
        found.append(f"no actor acts with the newest weights: {_lag(actors, status.latest.version)}")
    if not found:
        found.append(
            f"{len(actors)} rollout workers are connected and do not fill a batch; "
            f"{status.gauges.log_entries} entries are in the log"
        )
    return "; ".join(found)


def _lag(actors: Sequence[SessionRow], newest: int) -> str:
    worst = min(actors, key=lambda row: row.applied_version)
    return (
        f"{worst.actor_id} acts with version {worst.applied_version}, version {newest} is published; "
        "they do not reach it, or its environment stands still"
    )
