"""What those who look after a chat see of its loop, and by which numbers its canary is judged."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from penstock.registry.canary_trial import Cause, TrialState
from penstock.registry.records import MAX_EVENTS, Action, Status
from penstock.registry.registry import Registry
from penstock.workloads.chat.loop import loop_state
from penstock.workloads.chat.loop.ensemble import MEMBERS
from penstock.workloads.chat.loop.labels import NewRatings
from penstock.workloads.chat.loop.loop_state import Step
from penstock.workloads.chat.loop.weighing import read_weighed, standing_weights
from penstock.workloads.language.heads.head import PREFERRED

PAST: Final = 10
"""Rounds that are shown."""


def look_at_loop(run: Path, registry: Registry, policy: str) -> dict[str, Any] | None:
    """Return where the loop of a run stands, as JSON values; None where it never was started.

    Raises ConfigurationError for a state that cannot be read, RegistryError.
    """
    folder = loop_state.folder_of(run)
    state, pause = loop_state.read_state(folder), loop_state.read_pause(folder)
    if not state.order:
        return None
    abandoned = loop_state.read_abandonment(folder)
    new = NewRatings(policy, state.taken if state.step is Step.WAITING else state.through)
    return {
        "round": state.number,
        "step": state.step.value,
        "paused": None if pause is None else asdict(pause),
        "failure": state.failure,
        "tries": state.tries,
        "abandoned": None if abandoned is None or abandoned.number != state.number else asdict(abandoned),
        "note": state.note,
        "newRatings": new.look(registry),
        "labels": state.labels,
        "labelsWanted": state.order["labels"],
        "weights": standing_weights(state.order, read_weighed(folder)),
        "judge": _judge(state.judge) if state.judge else None,
        "base": state.base,
        "version": state.version,
        "auc": state.auc,
        "past": [asdict(one) for one in reversed(state.past[-PAST:])],
    }


def _judge(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return how well the newest reward model knows each criterion, by ratings that were held out."""
    measures = found["measures"]
    return {
        "round": found["round"],
        "heads": [
            {
                "head": name,
                "weight": found["weights"][name],
                "ratings": one["ratings"],
                "auc": one["auc"],
                "squaredError": one["squared_error"],
                "calibrationError": one["calibration_error"],
            }
            for name, one in measures["heads"].items()
            if name not in MEMBERS
        ],
        "pairs": measures["pairs"],
        "pairAccuracy": measures["pair_accuracy"],
        "pairsWeight": found["weights"][PREFERRED],
    }


def look_at_canaries(registry: Registry, policy: str, false_alarm: float | None) -> dict[str, Any]:
    """Return what is known of the canary that is on trial, and how many there have been.

    false_alarm: of each canary: the chance that one that equals the active version is ever taken for worse or
    better; None where that is not known. `worse`, `better`: how much of the evidence that a verdict needs is
    there, 1: the verdict. `ratesDiffer`: people rate the arms more or less often, so no verdict rests on it
    that the canary is better.
    """
    trial, state = registry.trial(policy)
    tried = {
        one.version
        for one in registry.events(policy, MAX_EVENTS)
        if one.action is Action.PROMOTED and one.detail.get("to") == Status.CANARY.value
    }
    return {
        "tried": len(tried),
        "falseAlarm": false_alarm,
        "trial": None if trial is None else _shown(trial.canary, state, false_alarm),
    }


def _shown(version: int, state: TrialState | None, false_alarm: float | None) -> dict[str, Any]:
    found = state or TrialState()
    first = found.levels[0]
    return {
        "version": version,
        "verdict": found.verdict.text,
        "canaryPeople": first.canary,
        "activePeople": first.active,
        "worse": _progress(found, Cause.LOWER_RETURN, false_alarm),
        "better": _progress(found, Cause.HIGHER_RETURN, false_alarm),
        "ratesDiffer": found.rates_differ,
    }


def _progress(state: TrialState, cause: Cause, false_alarm: float | None) -> float | None:
    return None if false_alarm is None else min(1.0, state.progress(cause, false_alarm))
