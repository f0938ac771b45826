"""Why nothing was injected, or what became of what was: from an injector's folder alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.injector.durable_lines import read_lines
from penstock.workloads.goals.injector.injection_journal import (
    STOPPED,
    read_feedback,
    read_injections,
    told_of,
)
from penstock.workloads.goals.injector.injection_records import Feedback, Injection
from penstock.workloads.goals.injector.success_probability import reliability

_SHOWN: Final = 20
_REMEDIES: Final = {
    "auto is off": "start with --auto to carry goals out",
    "threshold": "lower --threshold, mark goals as safe so that --explore tries them, or train longer",
    "quiet hours": "wait, or change --quiet",
    "daily limit": "wait for midnight, or raise --daily-limit",
    "veto": "an operator forbade them",
    "the injector ends": "it was asked to end while they could still be vetoed",
}


def explain(folder: Path) -> dict[str, Any]:
    """Return what a folder says as JSON values; raises ConfigurationError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"--folder {folder}: is no folder; name the one that `penstock inject` works in"
        )
    injections, outcomes = read_injections(folder), read_feedback(folder)
    told = told_of(injections, outcomes)
    fits = reliability([one.expected for one in told], [one.success for one in told])
    held = Counter(
        str(one.metadata.get("held") or "interrupted") for one in injections.values() if not one.injected
    )
    stops = [line for _, line in read_lines(folder / STOPPED)]
    stopped = stops[-1] if stops and not stops[-1].get("resumed") else None
    return {
        "proposed": len(injections),
        "injected": sum(one.injected for one in injections.values()),
        "succeeded": sum(one.success for one in told),
        "unknown": sum(one.success is None for one in outcomes.values()),
        "held": dict(held.most_common()),
        "stopped": None if stopped is None else str(stopped.get("why")),
        "confidence": _quantiles([one.confidence for one in injections.values()]),
        "reliability": None if fits is None else asdict(fits),
        "last": [_short(one, outcomes.get(one.goal_id)) for one in list(injections.values())[-_SHOWN:]],
    }


def as_text(told: dict[str, Any]) -> str:
    """Return what `explain` found, for a person."""
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


def outcome_of(one: Injection, found: Feedback | None) -> str:
    """Return what became of a goal, in words."""
    if not one.injected:
        return "not injected"
    if found is None:
        return "under way"
    return {True: "success", False: "failure", None: "interrupted"}[found.success]


def _short(one: Injection, found: Feedback | None) -> dict[str, Any]:
    kept = one.model_dump(include={"goal_id", "goal", "confidence", "priority", "reasoning", "timestamp"})
    return kept | {"outcome": outcome_of(one, found)}
