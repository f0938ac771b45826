"""An injector as the page shows it: its last day and its last goals, from the ends of its files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.workloads.goals.injector.auto_switch import last_switch
from penstock.workloads.goals.injector.durable_lines import read_lines, read_newest_lines
from penstock.workloads.goals.injector.explanation import outcome_of
from penstock.workloads.goals.injector.injection_journal import FEEDBACK, INJECTIONS, STOPPED, VETOES, told_of
from penstock.workloads.goals.injector.injection_records import Feedback, Injection, Veto, read_record
from penstock.workloads.goals.injector.pulse import Beat, last_beat
from penstock.workloads.goals.injector.success_probability import LAST, reliability

DAY_S: Final = 86_400.0
BINS: Final = 10
SHOWN: Final = 20
_MOST_BYTES: Final = 8 * 2**20
"""How much of the end of a file is read: some ten thousand goals."""
_SILENT_S: Final = 60.0
"""An injector that was not heard for so long beyond its interval has ended, or hangs."""


def view_of(folder: Path, now: float) -> dict[str, Any]:
    """Return what the page shows, as JSON values. now: Unix time in seconds.

    Raises ConfigurationError for a line that cannot be read.
    """
    injections, outcomes = _newest(folder, INJECTIONS, Injection), _newest(folder, FEEDBACK, Feedback)
    vetoed = _newest(folder, VETOES, Veto).keys()
    told = told_of(injections, outcomes)
    judged = reliability([one.expected for one in told], [one.success for one in told])
    day = [one for one in injections.values() if one.timestamp > now - DAY_S]
    recent = [one.success for one in told[-LAST:]]
    life = _life(folder, now)
    open_s = life["rules"]["veto_s"] + _SILENT_S if life["state"] == "running" else 0.0
    return {
        **life,
        "day": _day(day, outcomes),
        "success": {"of": len(recent), "share": sum(recent) / len(recent) if recent else None},
        "confidence": _histogram([one.confidence for one in day]),
        "reliability": None if judged is None else asdict(judged),
        "goals": [
            _goal(
                one,
                outcomes.get(one.goal_id),
                is_vetoed=one.goal_id in vetoed,
                is_open=one.timestamp > now - open_s,
            )
            for one in reversed(list(injections.values())[-SHOWN:])
        ],
    }


def summary_of(folder: Path, now: float) -> dict[str, Any]:
    """Return what a list of injectors shows of one. now: Unix time in seconds."""
    return _life(folder, now)


def _life(folder: Path, now: float) -> dict[str, Any]:
    beat, switched = last_beat(folder), last_switch(folder)
    stops = [line for _, line in read_lines(folder / STOPPED)]
    stopped = str(stops[-1].get("why")) if stops and not stops[-1].get("resumed") else None
    return {
        "state": _state(beat, now, stopped=stopped is not None),
        "seen": None if beat is None else beat.at,
        "auto": switched.on if switched is not None else bool(beat and beat.auto),
        "stopped": stopped,
        "trouble": beat.trouble if beat is not None else "",
        "version": None if beat is None or not beat.version else beat.version,
        "rules": None
        if beat is None
        else beat.model_dump(
            include={"threshold", "explore", "interval_s", "daily_limit", "veto_s", "quiet"}
        ),
    }


def _state(beat: Beat | None, now: float, *, stopped: bool) -> str:
    if stopped:
        return "stopped"
    if beat is None or beat.ended:
        return "ended"
    silent = now - beat.at > beat.interval_s + beat.veto_s + _SILENT_S
    return "silent" if silent else "running"


def _day(day: Sequence[Injection], outcomes: Mapping[str, Feedback]) -> dict[str, Any]:
    known = [outcomes[one.goal_id].success for one in day if one.goal_id in outcomes]
    injected = sum(one.injected for one in day)
    held = Counter(str(one.metadata.get("held")) for one in day if not one.injected)
    return {
        "proposed": len(day),
        "injected": injected,
        "succeeded": sum(one is True for one in known),
        "failed": sum(one is False for one in known),
        "held": {why: count for why, count in held.most_common() if why},
        "perHour": injected / 24,
    }


def _histogram(certainties: Sequence[float]) -> list[int]:
    counts: list[int] = np.histogram(np.array(certainties), bins=BINS, range=(0, 1))[0].tolist()
    return counts


def _goal(one: Injection, found: Feedback | None, *, is_vetoed: bool, is_open: bool) -> dict[str, Any]:
    """is_open: an injector lives that may still be waiting for a veto of it."""
    shown = one.model_dump(
        include={"goal_id", "goal", "confidence", "priority", "expected_reward", "reasoning", "timestamp"}
    )
    waits = is_open and not one.injected and not one.metadata.get("held")
    return shown | {
        "outcome": "waits" if waits else outcome_of(one, found),
        "held": one.metadata.get("held") or None,
        "learned": one.metadata.get("learned"),
        "vetoed": is_vetoed,
        "mayVeto": waits and not is_vetoed,
    }


def _newest(folder: Path, name: str, kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in read_newest_lines(folder / name, _MOST_BYTES):
        record = read_record(kind, name, None, line)
        found[record.goal_id] = record
    return found
