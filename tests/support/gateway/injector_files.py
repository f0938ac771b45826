"""Files of an injector of goals, as it leaves them."""

import json
from pathlib import Path
from typing import Any

from penstock.workloads.goals.injection_journal import INJECTIONS


def goal(name: str, *, injected: bool = False, held: str = "") -> dict[str, Any]:
    """A line of a goal."""
    return {
        "goal_id": name, "goal": "trim", "timestamp": 1.0, "reasoning": "", "priority": 0.5,
        "confidence": 0.5, "expected_reward": None, "version": 1, "injected": injected, "processed": False,
        "metadata": {"held": held},
    }  # fmt: skip


def write_goals(folder: Path, *lines: dict[str, Any]) -> None:
    """The file of proposals."""
    (folder / INJECTIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))
