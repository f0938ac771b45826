"""What those who look after a chat see of its loop, and by which numbers its canary is judged."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from penstock.registry.canary import Cause, TrialState
from penstock.registry.ratings import KeptRating
from penstock.registry.records import MAX_EVENTS, Action, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import replace_file
from penstock.workloads.chat.loop import loop_state
from penstock.workloads.chat.loop.loop_state import MEMBERS, Step, read_weighed, standing_weights
from penstock.workloads.chat.ratings import RatingRules, Row, filter_ratings
from penstock.workloads.language.feedback import rating_row, rows_of
from penstock.workloads.language.prompt import identity, parse_prompt
from penstock.workloads.language.reward.heads import PREFERRED

# ---- What people have said of a run's answers that counts, and how much of it is new.

_PAGE: Final = 1000


class NewRatings:
    """Counts the ratings of a policy behind a number, and reads each of them once."""

    def __init__(self, policy: str, after: int) -> None:
        self._policy = policy
        self.count, self.newest = 0, after

    def look(self, registry: Registry) -> int:
        while page := registry.ratings(self._policy, self.newest, _PAGE):
            self.count, self.newest = self.count + len(page), page[-1].number
        return self.count


def believed(registry: Registry, policy: str, rules: RatingRules, through: int) -> list[Row]:
    """Return the rows that count among the ratings up to a number, each with its `number`."""
    rows = [rating_row(one) for one in _through(registry, policy, through)]
    return filter_ratings(rows, rules).kept


def new_among(rows: Iterable[Row], after: int) -> int:
    return sum(row["number"] > after for row in rows)


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines, whole and on the disk when this returns; raises OSError."""
    replace_file(file, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def replayed_prompts(rows: Iterable[Row], prompts: str) -> list[dict[str, Any]]:
    """Return what was rated, each prompt once, and behind it the run's own, so that those stay trained."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(_name(row), row["prompt"])
    for _, row in rows_of(prompts) if prompts else ():
        if not isinstance(row, ValueError) and row.get("prompt") is not None:
            found.setdefault(_name(row), row["prompt"])
    return [{"prompt": prompt} for prompt in found.values()]


def _through(registry: Registry, policy: str, through: int) -> Iterable[KeptRating]:
    after = 0
    while page := registry.ratings(policy, after, _PAGE):
        after = page[-1].number
        yield from (one for one in page if one.number <= through)


def _name(row: Row) -> str:
    try:
        return identity(parse_prompt(row["prompt"]))
    except ValueError:
        return repr(row["prompt"])  # the training says what is wrong with it


PAST: Final = 10
"""Rounds that are shown."""


def look_at_loop(run: Path, registry: Registry, policy: str) -> dict[str, Any] | None:
    """Return where the loop of a run stands, as JSON values; None where it was never started."""
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
