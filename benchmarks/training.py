"""Whole runs of `penstock train CartPole-v1`: steps per second, seconds until solved, CPU of each process."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import Options, Table

TRAIN_STEPS = 400_000
ROLES = ("actor", "broker", "redis", "learner", "evaluator")
PENSTOCK = str(Path(sys.executable).with_name("penstock"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The result of a run.

    steps_per_second over the training time; solved_s: seconds of training until solved, None when not.
    cpu_seconds: by role, the processes of a role together, from their start to their end.
    """

    steps_per_second: float
    solved_s: float | None
    env_steps: int
    cpu_seconds: Mapping[str, float]

    def cpu_per_million(self, role: str) -> float:
        """Return the CPU seconds of a role for a million environment steps."""
        return self.cpu_seconds[role] / self.env_steps * 1e6


def table(options: Options) -> Table:
    """Return end-to-end steps per second, and seconds until solved."""
    rows = []
    for vectorise in ("sync", "vector"):
        choice = ("--set", f"environment.vectorise={vectorise}")
        full = [measure(choice, total_steps=TRAIN_STEPS) for _ in range(options.repeat)]
        solved = [measure(choice, total_steps=None) for _ in range(options.repeat)]
        seconds = [run.solved_s for run in solved if run.solved_s is not None]
        rows.append((
            vectorise,
            statistics.median(run.steps_per_second for run in full),
            statistics.median(seconds) if seconds else None,
            f"{len(seconds)} of {options.repeat}",
            *(statistics.median(run.cpu_per_million(role) for run in full) for role in ROLES),
        ))  # fmt: skip
    return Table(
        title=f"penstock train CartPole-v1, {TRAIN_STEPS:,} steps",
        columns=(
            "vectoriser",
            "environment steps/s",
            "training seconds until solved",
            "solved",
            *(f"{role}: CPU s per 10⁶ steps" for role in ROLES),
        ),
        rows=rows,
        note=(
            "CPU seconds: the processes of a role together, from their start (imports included) to their end"
        ),
    )


def measure(options: Sequence[str], *, total_steps: int | None) -> Training:
    """Run once; with `total_steps` it goes on to its end, else it stops at the target.

    Raises RuntimeError with the last line of its error output when the run fails.
    """
    if total_steps is not None:
        options = (*options, "--total-steps", str(total_steps), "--set", "learner.stop_at_target=false")
    summary = _train(options)
    return Training(
        steps_per_second=float(summary["env_steps_per_second"] or 0.0),
        solved_s=summary["solved_at"]["seconds"] if summary["solved"] else None,
        env_steps=summary["env_steps"],
        cpu_seconds=spent_by_role(summary),
    )


def spent_by_role(summary: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the CPU seconds of a run's processes by role; 0 for a role that it does not have."""
    spent: Counter[str] = Counter()
    for process in summary["processes"]:
        spent[process["role"]] += process["cpu_seconds"]
    return spent


def _train(options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        command = [PENSTOCK, "train", "CartPole-v1", *options, "--run-dir", f"{folder}/run", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no error output"])[-1])
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
