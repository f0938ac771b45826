"""A prediction as JSON values, which are stored, and as lines for people."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.dry_run.calibration import Calibration
from launch.dry_run.limits import LimitCheck, Limits
from launch.dry_run.prediction import Prediction
from launch.inspection.quantities import size, sizes, span, spans
from launch.inspection.returns import shown
from launch.run.plan import Plan
from launch.run.stored_prediction import fingerprint
from penstock.config.estimate import Range, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The results of a dry run.

    scores: of the starting point that the preparation made, and of the last calibration.
    """

    plan: Plan
    calibrations: Sequence[Calibration]
    prediction: Prediction
    limits: Limits
    verdict: LimitCheck
    scores: Mapping[str, Scores]


def to_json(found: DryRun) -> dict[str, Any]:
    """Return the object that is stored, and printed with --json. Seconds and bytes."""
    prediction, limits, settings = found.prediction, found.limits, found.plan.settings
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "configuration": fingerprint(settings),
        "environment": settings.environment.id,
        "workload": settings.workload,
        "seed": settings.seed,
        "total_steps": settings.learner.total_steps,
        "target_return": found.plan.target,
        "essentials": essentials(found.plan),
        "seconds": prediction.seconds.to_json(),
        "seconds_by_part": _each(prediction.time),
        "seconds_per_step": _precise(prediction.seconds_per_step),
        "memory_bytes": prediction.memory.to_json(),
        "memory_bytes_by_role": dict(prediction.roles),
        "device_memory_bytes": prediction.device_memory and prediction.device_memory.to_json(),
        "disk_bytes": prediction.disk_bytes.to_json(),
        "disk_bytes_by_name": _each(prediction.disk),
        "available": {
            "memory_bytes": limits.memory.bytes,
            "device_memory_bytes": limits.device and limits.device.bytes,
            "disk_bytes": limits.disk.bytes,
        },
        "fits": not found.verdict.refused,
        "refused": list(found.verdict.refused),
        "doubtful": list(found.verdict.doubtful),
        "scores": {name: asdict(scores) for name, scores in found.scores.items()},
        "calibrations": [_calibration(one) for one in found.calibrations],
    }


def _each(ranges: Mapping[str, Range]) -> dict[str, dict[str, float]]:
    return {name: given.to_json() for name, given in ranges.items()}


def _precise(given: Range) -> dict[str, float]:
    return {"low": given.low, "likely": given.likely, "high": given.high}


def _calibration(one: Calibration) -> dict[str, Any]:
    return {
        "steps": one.steps,
        "startup_seconds": round(one.startup_seconds, 3),
        "training_seconds": round(one.training_seconds, 3),
        "ending_seconds": round(one.ending_seconds, 3),
        "pace": None if one.pace is None else {**asdict(one.pace)},
        "peak_memory_bytes": one.all_memory.peak,
        "disk_bytes": sum(one.disk.values()),
        "evaluation": one.evaluation,
    }


def essentials(plan: Plan) -> dict[str, Any]:
    """Return the settings that determine most of what a run takes."""
    settings = plan.settings
    return {
        "algorithm": settings.algorithm.name,
        "update_steps": settings.algorithm.update_steps,
        "actors": settings.actor.count,
        "environments": settings.environment.count,
        "unroll_length": settings.actor.unroll_length,
        "ranks": settings.learner.ranks,
        "device": settings.learner.device,
        "precision": settings.learner.precision,
        "evaluation_episodes": settings.evaluation.episodes,
        "evaluation_interval_steps": settings.evaluation.interval_steps,
        "checkpoint_interval_s": settings.learner.checkpoint_interval_s,
        "durability": settings.broker.durability,
        **{f"policy {key}": value for key, value in settings.policy.kwargs.items()},
        **{f"environment {key}": value for key, value in settings.environment.kwargs.items()},
    }


def lines(found: DryRun, file: Path) -> list[str]:
    """Return lines for people. file: where the prediction was stored."""
    prediction, settings, limits = found.prediction, found.plan.settings, found.limits
    device = prediction.device_memory
    text = [
        (
            f"{settings.environment.id}: dry run of {settings.learner.total_steps:,} steps (seed "
            f"{settings.seed})"
        ),
        *_wrapped("configuration", [f"{key} {value}" for key, value in essentials(found.plan).items()]),
        *_wrapped("calibration", [_measured(one) for one in found.calibrations]),
        f"  time           {spans(prediction.seconds)}",
        *_wrapped("", [f"{name} {span(part.likely)}" for name, part in prediction.time.items()]),
        f"  memory         {sizes(prediction.memory)} of {size(limits.memory.bytes)}",
        *_wrapped("", [f"{role} {size(peak)}" for role, peak in prediction.roles.items()]),
        f"  GPU memory     {'none seen' if device is None else sizes(device)}",
        f"  disk           {sizes(prediction.disk_bytes)} of {size(limits.disk.bytes)}",
        *(f"  {name:14} {_scores(scores)}" for name, scores in found.scores.items()),
    ]
    if found.plan.target is not None and settings.learner.stop_at_target:
        text.append(f"  target         {found.plan.target:g} ends it sooner: the time is that of all steps")
    if settings.evaluation.patience is not None:
        text.append("  patience       evaluation.patience may end it sooner: the time is that of all steps")
    text += [f"  may not fit    {reason}" for reason in found.verdict.doubtful]
    return [*text, f"  stored         {file}: the run of this configuration is compared with it"]


def _measured(one: Calibration) -> str:
    pace = (
        "too short for a pace"
        if one.pace is None
        else f"{1 / one.pace.seconds_per_step.likely:,.0f} a second"
    )
    return f"{one.steps:,} steps in {one.training_seconds:.1f} s ({pace})"


def _scores(scores: Scores) -> str:
    return f"{scores.count:,}, mean {shown(scores.mean)}, std {shown(scores.std, scores.mean)}"


def _wrapped(title: str, words: Sequence[str], width: int = 110) -> list[str]:
    """Return words behind a title, over as many lines as they need."""
    rows: list[str] = [""]
    for word in words:
        joined = f"{rows[-1]}, {word}" if rows[-1] else word
        rows = [*rows[:-1], joined] if len(joined) <= width or not rows[-1] else [*rows, word]
    return [f"  {title if number == 0 else '':14} {row}" for number, row in enumerate(rows)]
