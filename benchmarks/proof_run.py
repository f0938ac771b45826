"""Run one learning proof: `penstock train … --json` in a temporary folder, and the record of its result."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.proof_records import Record, commit, machine, thin
from benchmarks.proofs import Proof

PENSTOCK = (str(Path(sys.executable).with_name("penstock")),)
KEPT = (
    "solved", "mean_return", "evaluation", "env_steps", "updates", "wall_seconds", "training_seconds",
    "solved_at",
    "env_steps_per_second", "staleness", "ledger",
)  # fmt: skip


def run(proof: Proof, program: Sequence[str]) -> Record:
    """Run one proof with `program` (the start of the command line) and return its record.

    A run that fails is a record too, with the last line of its error output as the reason.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        command = [*program, *proof.arguments(), "--run-dir", str(Path(folder) / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        curve = _curve(Path(folder) / "run" / "metrics.jsonl")
    summary = _summary(done)
    evaluation = (summary.get("evaluation") or {}).get("mean")
    return Record(
        task=proof.task,
        algorithm=proof.algorithm,
        variant=proof.variant,
        seed=proof.seed,
        command=proof.command,
        commit=commit(),
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        passed=proof.passes(evaluation),
        result=summary,
        curve=curve,
    )


def _summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        return {"exit": done.returncode, "error": reason}
    summary = json.loads(done.stdout)
    return {name: summary.get(name) for name in KEPT}


def _curve(path: Path) -> list[tuple[int, float]]:
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    points = [(r["env_steps"], r["mean_return"]) for r in rows if r.get("mean_return") is not None]
    return thin([(int(steps), round(float(mean), 3)) for steps, mean in points])
