"""Whole runs of `penstock train CartPole-v1`: steps per second, and seconds until solved."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """steps_per_second over the training time; solved_s: seconds of training until solved, None when not."""

    steps_per_second: float
    solved_s: float | None


def measure(*, vectorise: str, total_steps: int | None) -> Training:
    """One run; with `total_steps` it goes on to its end, else it stops at the target.

    Raises RuntimeError with the last line of its error output when the run fails.
    """
    options = ["--set", f"environment.vectorise={vectorise}"]
    if total_steps is not None:
        options += ["--total-steps", str(total_steps), "--set", "learner.stop_at_target=false"]
    summary = _train(options)
    return Training(
        steps_per_second=float(summary["env_steps_per_second"] or 0.0),
        solved_s=summary["training_seconds"] if summary["solved"] else None,
    )


def _train(options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        command = [PENSTOCK, "train", "CartPole-v1", *options, "--run-dir", f"{folder}/run", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no error output"])[-1])
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
