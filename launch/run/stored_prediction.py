"""Storage of a prediction until its run, and its comparison with the run's summary.

    RUN/dry-run.json                     of a dry run with --run-dir RUN, and of every run that was predicted
    runs/dry-runs/CONFIGURATION.json     of one without: for the next run of that very configuration

A run takes a prediction as its own only where it was made of the same configuration, whatever the names and
folders.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from launch.run.plan import Plan
from penstock.config.settings import ConfigurationError, Settings

FILE: Final = "dry-run.json"
_FOLDER: Final = "dry-runs"
_ELSEWHERE: Final = {"run", "security", "metrics", "logs"}
"""Settings that name a run or its place; they do not change what the run takes."""
_FIGURES: Final = {
    "time": ("seconds", "wall_seconds"),
    "memory": ("memory_bytes", "peak_memory_bytes"),
    "device_memory": ("device_memory_bytes", "device_memory_bytes"),
    "disk": ("disk_bytes", "disk_bytes"),
}
"""The figures that are compared: key of the prediction, key of the summary."""
_OF_ALL_STEPS: Final = ("time", "disk")
ALL_STEPS: Final = "steps"


def fingerprint(settings: Settings) -> str:
    """Return a digest of the settings that determine what a run does."""
    content = settings.model_dump(mode="json", exclude=_ELSEWHERE)
    content["actor"]["ack_journal"] = settings.actor.ack_journal is not None
    content["learner"]["record"] = settings.learner.record is not None
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def place_of(plan: Plan, *, named: bool) -> Path:
    """Return the path of a prediction. named: the user said which folder the run shall have."""
    if named:
        return plan.run_dir / FILE
    return _shelved(plan)


def _shelved(plan: Plan) -> Path:
    return plan.run_dir.parent / _FOLDER / f"{fingerprint(plan.settings)[:16]}.json"


def write(file: Path, prediction: dict[str, Any]) -> None:
    """Write the file in one step, so that readers see the whole of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(prediction, indent=2) + "\n")
    temporary.replace(file)


def find(plan: Plan) -> dict[str, Any] | None:
    """Return the prediction for this run and move it into the run's folder.

    Returns None where there is none of this configuration. Raises ConfigurationError for a file that holds
    something else.
    """
    for file in (plan.run_dir / FILE, _shelved(plan)):
        if not file.is_file():
            continue
        prediction = _read(file)
        if prediction.get("configuration") == fingerprint(plan.settings):
            if file.parent != plan.run_dir:
                write(plan.run_dir / FILE, prediction)
            return prediction
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except ValueError as error:
        raise ConfigurationError(f"{file}: is no prediction of a dry run ({error}); remove it") from error


def compare(prediction: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """Return each figure as predicted and as measured.

    error: by how much the prediction was higher, as a share of the measurement.

    A run that ended before all its steps were done is compared by the seconds that a step took: its time and
    its folder are not those that were predicted. The time of a process that was not there from the start is
    left out.

    prediction, summary: JSON objects of `dry-run.json` and `summary.json`.
    """
    early = summary["ending"] != ALL_STEPS
    found: dict[str, Any] = {
        name: None
        if (early and name in _OF_ALL_STEPS)
        else _compared(prediction[predicted], summary.get(came))
        for name, (predicted, came) in _FIGURES.items()
    }
    found["seconds_per_step"] = _per_step(prediction, summary) if early else None
    found["note"] = _note(prediction, summary) if early else ""
    return found


def _per_step(prediction: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return seconds of learning per step that was done.

    The warm-up is a larger part of them than of all steps.
    """
    steps, rate = summary["env_steps"], summary["env_steps_per_second"]
    if not steps or not rate:
        return None
    missing = max(0, prediction["total_steps"] - steps)
    learning, per_step = prediction["seconds_by_part"]["learning"], prediction["seconds_per_step"]
    predicted = {end: (learning[end] - missing * per_step[end]) / steps for end in per_step}
    return _compared(predicted, 1 / rate)


def _compared(predicted: dict[str, float] | None, actual: float | None) -> dict[str, Any] | None:
    if predicted is None or not actual:
        return None
    return {
        "predicted": predicted,
        "actual": actual,
        "error": round(predicted["likely"] / actual - 1, 4),
        "within": predicted["low"] <= actual <= predicted["high"],
    }


def _note(prediction: dict[str, Any], summary: dict[str, Any]) -> str:
    return (
        f"it ended early ({summary['ending'] or 'failed'}), after {summary['env_steps'] or 0:,} of "
        f"{prediction['total_steps']:,} steps: time is compared by step"
    )
