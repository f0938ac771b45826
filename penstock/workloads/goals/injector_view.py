"""What the folder of an injector says: on the command line, and on the page."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.workloads.goals.commands import InjectOptions
from penstock.workloads.goals.injection_journal import (
    LAST,
    Beat,
    Feedback,
    Injection,
    Told,
    Veto,
    last_beat,
    last_switch,
    newest,
    reliability,
    stopped_by,
    switch,
    told_of,
    veto,
)

# ---- Why nothing was injected, or what became of what was: from an injector's folder alone.

SHOWN: Final = 20
_FIELDS: Final = {"goal_id", "goal", "confidence", "priority", "reasoning", "timestamp"}
_REMEDIES: Final = {
    "auto is off": "start with --auto to carry goals out",
    "threshold": "lower --threshold, mark goals as safe so that --explore tries them, or train longer",
    "quiet hours": "wait, or change --quiet",
    "daily limit": "wait for midnight, or raise --daily-limit",
    "veto": "an operator forbade them",
    "the injector ends": "it was asked to end while they could still be vetoed",
}


OPERATOR: Final = "operator"
"""Who uses the command line, in the files of a folder."""


def once(asked: InjectOptions, *, as_json: bool) -> int:
    """Switch carrying out, else forbid a goal, else print the outcomes of a folder's goals."""
    if asked.switch is not None:
        if asked.switch not in ("on", "off"):
            raise ConfigurationError(f"--switch {asked.switch}: say on or off")
        switch(asked.folder, on=asked.switch == "on", by=OPERATOR)
    elif asked.veto is not None:
        veto(asked.folder, asked.veto, OPERATOR)
    else:
        told = explain(asked.folder)
        sys.stdout.write((json.dumps(told) if as_json else as_text(told)) + "\n")
    return EXIT_OK


def explain(folder: Path) -> dict[str, Any]:
    """Return what a folder says as JSON values; raises ConfigurationError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"--folder {folder}: is no folder; name the one that `penstock inject` works in"
        )
    injections, outcomes = newest(Injection, folder), newest(Feedback, folder)
    told = told_of(injections, outcomes)
    held = Counter(
        str(one.metadata.get("held") or "interrupted") for one in injections.values() if not one.injected
    )
    return {
        "proposed": len(injections),
        "injected": sum(one.injected for one in injections.values()),
        "succeeded": sum(success for _, success in told),
        "unknown": sum(one.success is None for one in outcomes.values()),
        "held": dict(held.most_common()),
        "stopped": stopped_by(folder),
        "confidence": _quantiles([one.confidence for one in injections.values()]),
        "reliability": _fits(told),
        "last": [
            one.model_dump(include=_FIELDS) | {"outcome": _outcome_of(one, outcomes.get(one.goal_id))}
            for one in list(injections.values())[-SHOWN:]
        ],
    }


def _fits(told: Sequence[Told]) -> dict[str, float] | None:
    return reliability([one.priority for one, _ in told], [success for _, success in told])


def as_text(told: dict[str, Any]) -> str:
    lines = [
        f"{told['proposed']} goals proposed, {told['injected']} injected, {told['succeeded']} succeeded"
        + (f", of {told['unknown']} the outcome is unknown" if told["unknown"] else "")
    ]
    if told["stopped"]:
        lines.append(
            f"it has stopped itself: {told['stopped']}; look at the last goals, then start with --resume"
        )
    if not told["proposed"]:
        lines.append("nothing was proposed: the policy drew nothing, or its log says that no server answered")
    for why, count in told["held"].items():
        lines.append(f"{count} held back: {why}; {_REMEDIES.get(why, 'it was killed before they began')}")
    if told["confidence"]:
        lines.append(
            "certainty of the proposals: " + ", ".join(f"{k} {v:.2f}" for k, v in told["confidence"].items())
        )
    if told["reliability"]:
        found = told["reliability"]
        lines.append(
            f"probability of success over the last {found['outcomes']}: off by {found['gap']:.2f} on "
            f"average, Brier score {found['brier']:.3f}"
        )
    lines += [
        f"  {one['goal_id']}  {one['goal']:20} π {one['confidence']:.2f}  success {one['priority']:.2f}  "
        f"{one['outcome']:12} {one['reasoning']}"
        for one in told["last"]
    ]
    return "\n".join(lines)


def _quantiles(certainties: Sequence[float]) -> dict[str, float]:
    if not certainties:
        return {}
    found = np.quantile(np.array(certainties), [0.1, 0.5, 0.9, 1.0])
    return dict(zip(("p10", "p50", "p90", "max"), map(float, found), strict=True))


def _outcome_of(one: Injection, found: Feedback | None) -> str:
    if not one.injected:
        return "not injected"
    if found is None:
        return "under way"
    return {True: "success", False: "failure", None: "interrupted"}[found.success]


# ---- An injector as the page shows it: its last day and its last goals, from the ends of its files.

DAY_S: Final = 86_400.0
BINS: Final = 10
_MOST_BYTES: Final = 8 * 2**20
"""How much of the end of a file is read: some ten thousand goals."""
_SILENT_S: Final = 60.0
"""An injector that was not heard for so long beyond its interval has ended, or hangs."""


def view_of(folder: Path, now: float) -> dict[str, Any]:
    """Return what the page shows, as JSON values. now: Unix time in seconds."""
    injections, outcomes = newest(Injection, folder, _MOST_BYTES), newest(Feedback, folder, _MOST_BYTES)
    vetoed = newest(Veto, folder, _MOST_BYTES)
    told = told_of(injections, outcomes)
    day = [one for one in injections.values() if one.timestamp > now - DAY_S]
    recent = [success for _, success in told[-LAST:]]
    life = summary_of(folder, now)
    open_s = life["rules"]["veto_s"] + _SILENT_S if life["state"] == "running" else 0.0
    return {
        **life,
        "day": _day(day, outcomes),
        "success": {"of": len(recent), "share": sum(recent) / len(recent) if recent else None},
        "confidence": np.histogram([one.confidence for one in day], BINS, (0, 1))[0].tolist(),
        "reliability": _fits(told),
        "goals": [
            _goal(one, outcomes, is_vetoed=one.goal_id in vetoed, is_open=one.timestamp > now - open_s)
            for one in reversed(list(injections.values())[-SHOWN:])
        ],
    }


def summary_of(folder: Path, now: float) -> dict[str, Any]:
    """Return what a list of injectors shows of one. now: Unix time in seconds."""
    beat, switched, stopped = last_beat(folder), last_switch(folder), stopped_by(folder)
    return {
        "state": "stopped" if stopped is not None else _state(beat, now),
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


def _state(beat: Beat | None, now: float) -> str:
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


def _goal(
    one: Injection, outcomes: Mapping[str, Feedback], *, is_vetoed: bool, is_open: bool
) -> dict[str, Any]:
    waits = is_open and not one.injected and not one.metadata.get("held")
    return one.model_dump(include={*_FIELDS, "expected_reward"}) | {
        "outcome": "waits" if waits else _outcome_of(one, outcomes.get(one.goal_id)),
        "held": one.metadata.get("held") or None,
        "learned": one.metadata.get("learned"),
        "vetoed": is_vetoed,
        "mayVeto": waits and not is_vetoed,
    }
