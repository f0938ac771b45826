"""The bandit of `tests.support.oracles.off_policy_truth` as a log of tasks."""

import json
from pathlib import Path
from typing import Any, Final

from tests.support.oracles import off_policy_truth as truth

PLAIN: Final = {"success": 1.0, "failure": 0.0, "step": 0.0, "fast": 0.0}
"""Weights of the reward by which a success earns 1, and nothing else counts."""


def line(number: int, event: truth.Event, **changes: Any) -> str:
    """An event as a line, its context one-hot; a change to None leaves the field out."""
    seen = {f"context{index}": float(event.context == index) for index in range(3)}
    good = {
        "time": float(number),
        "episode": f"e{number}",
        "step": 0,
        "observation": seen,
        "action": f"action{event.action}",
        "propensity": event.logged,
        "result": {"success": event.reward > 0},
    }
    return json.dumps({name: one for name, one in (good | changes).items() if one is not None})


def written(folder: Path, lines: list[str]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def bandit_log(folder: Path, seed: int, count: int, **changes: Any) -> Path:
    events = truth.bandit_log(seed, count)
    return written(folder, [line(number, event, **changes) for number, event in enumerate(events)])
