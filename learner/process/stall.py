"""Why a run makes no updates, in words that name what a person must look at."""

from collections.abc import Mapping, Sequence

from broker.log.records import SessionRow, Status
from penstock.wire.messages import Role


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
