"""The contents of an injector's folder, for the command line and for the page."""

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
    InjectionRules,
    KnownOutcome,
    Veto,
    known_outcomes,
    last_beat,
    last_switch,
    newest,
    reliability,
    stopped_by,
    switch,
    veto,
)

# ---- `penstock inject --explain`: why goals were not injected, and the outcomes of those that were.

SHOWN: Final = 20
_FIELDS: Final = {"goal_id", "goal", "confidence", "priority", "reasoning", "timestamp"}
_REMEDIES: Final = {
    "auto is off": "start with --auto to carry goals out",
    "threshold": "lower --threshold, mark goals as safe so that --explore tries them, or train longer",
    "quiet hours": "wait, or change --quiet",
    "daily limit": "wait for midnight, or raise --daily-limit",
    "veto": "an operator forbade them",
    "the injector ends": "it had to end while they could still be vetoed",
}
_OPERATOR: Final = "operator"
"""Name of the user of the command line, in the files of a folder."""


def once(options: InjectOptions, *, as_json: bool) -> int:
    """Switch an injector on or off, or forbid a goal, or print the outcomes of a folder's goals."""
    if options.switch is not None:
        if options.switch not in ("on", "off"):
            raise ConfigurationError(f"--switch {options.switch}: say on or off")
        switch(options.folder, on=options.switch == "on", by=_OPERATOR)
    elif options.veto is not None:
        veto(options.folder, options.veto, _OPERATOR)
    else:
        account = explain(options.folder)
        sys.stdout.write((json.dumps(account) if as_json else as_text(account)) + "\n")
    return EXIT_OK


def explain(folder: Path) -> dict[str, Any]:
    """Return the account of a folder as JSON values; raises ConfigurationError where there is no folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"--folder {folder}: is no folder; name the one that `penstock inject` works in"
        )
    injections, outcomes = newest(Injection, folder), newest(Feedback, folder)
    known = known_outcomes(injections, outcomes)
    held = Counter(
        str(one.metadata.get("held") or "interrupted") for one in injections.values() if not one.injected
    )
    certainties = [one.confidence for one in injections.values()]
    quantiles = np.quantile(certainties, [0.1, 0.5, 0.9, 1.0]).tolist() if certainties else []
    return {
        "proposed": len(injections),
        "injected": sum(one.injected for one in injections.values()),
        "succeeded": sum(success for _, success in known),
        "unknown": sum(one.success is None for one in outcomes.values()),
        "held": dict(held.most_common()),
        "stopped": stopped_by(folder),
        "confidence": dict(zip(("p10", "p50", "p90", "max"), quantiles, strict=False)),
        "reliability": _reliability(known),
        "last": [
            one.model_dump(include=_FIELDS) | {"outcome": _outcome_of(one, outcomes.get(one.goal_id))}
            for one in list(injections.values())[-SHOWN:]
        ],
    }


def _reliability(known: Sequence[KnownOutcome]) -> dict[str, float] | None:
    return reliability([one.priority for one, _ in known], [success for _, success in known])


def as_text(account: dict[str, Any]) -> str:
    lines = [
        f"{account['proposed']} goals proposed, {account['injected']} injected, "
        f"{account['succeeded']} succeeded"
        + (f", of {account['unknown']} the outcome is unknown" if account["unknown"] else "")
    ]
    if account["stopped"]:
        lines.append(
            f"it has stopped itself: {account['stopped']}; look at the last goals, then start with --resume"
        )
    if not account["proposed"]:
        lines.append("nothing was proposed: the policy drew nothing, or no server answered (see the log)")
    for why, count in account["held"].items():
        lines.append(f"{count} held back: {why}; {_REMEDIES.get(why, 'it was killed before they began')}")
    if account["confidence"]:
        quantiles = ", ".join(f"{name} {value:.2f}" for name, value in account["confidence"].items())
        lines.append(f"certainty of the proposals: {quantiles}")
    if account["reliability"]:
        fit = account["reliability"]
        lines.append(
            f"probability of success over the last {fit['outcomes']}: off by {fit['gap']:.2f} on "
            f"average, Brier score {fit['brier']:.3f}"
        )
    lines += [
        f"  {one['goal_id']}  {one['goal']:20} π {one['confidence']:.2f}  success {one['priority']:.2f}  "
        f"{one['outcome']:12} {one['reasoning']}"
        for one in account["last"]
    ]
    return "\n".join(lines)


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
"""An injector whose state is older than its interval and this has ended, or hangs."""


def view_of(folder: Path, now: float) -> dict[str, Any]:
    """Return what the page shows, as JSON values. now: Unix time in seconds."""
    injections, outcomes = newest(Injection, folder, _MOST_BYTES), newest(Feedback, folder, _MOST_BYTES)
    vetoed = newest(Veto, folder, _MOST_BYTES)
    known = known_outcomes(injections, outcomes)
    day = [one for one in injections.values() if one.timestamp > now - DAY_S]
    recent = [success for _, success in known[-LAST:]]
    life = summary_of(folder, now)
    open_s = life["rules"]["veto_s"] + _SILENT_S if life["state"] == "running" else 0.0
    return {
        **life,
        "day": _day(day, outcomes),
        "success": {"of": len(recent), "share": sum(recent) / len(recent) if recent else None},
        "confidence": np.histogram([one.confidence for one in day], BINS, (0, 1))[0].tolist(),
        "reliability": _reliability(known),
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
        "seen": beat and beat.at,
        "auto": switched.on if switched is not None else bool(beat and beat.auto),
        "stopped": stopped,
        "trouble": beat.trouble if beat is not None else "",
        "version": (beat and beat.version) or None,
        "rules": beat and beat.model_dump(include=set(InjectionRules.model_fields)),
    }


def _state(beat: Beat | None, now: float) -> str:
    if beat is None or beat.ended:
        return "ended"
    is_silent = now - beat.at > beat.interval_s + beat.veto_s + _SILENT_S
    return "silent" if is_silent else "running"


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
