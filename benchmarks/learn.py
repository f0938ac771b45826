"""Run every learning proof that `docs/results.jsonl` does not hold yet, then write `docs/algorithms.md`.

Each proof is one `penstock train … --json` in a temporary folder, and one line appended when it ends:
stop at any time and start again. `python -m benchmarks.learn --help` lists the choices.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.proofs import PROOFS, Proof
from benchmarks.results import Record, append, commit, machine, missing, read, standing, thin

ROOT = Path(__file__).resolve().parents[1]
PENSTOCK = (str(Path(sys.executable).with_name("penstock")),)
KEPT = (
    "solved", "mean_return", "evaluation", "env_steps", "updates", "wall_seconds", "training_seconds",
    "env_steps_per_second", "staleness", "ledger",
)  # fmt: skip


def main() -> int:
    """Exit status: 0 when every proof that was asked for has passed."""
    options = _parse()
    chosen = [p for p in PROOFS if options.only in f"{p.title} {p.algorithm} seed {p.seed}"]
    todo = missing(chosen, read(options.results), retry=options.retry)
    for number, proof in enumerate([] if options.report else todo, 1):
        print(f"[{number}/{len(todo)}] {proof.title}, {proof.algorithm}, seed {proof.seed} …", flush=True)
        record = run(proof, PENSTOCK)
        append(options.results, record)
        print(f"    {'passed' if record.passed else 'NOT passed'}: {_outcome(record)}", flush=True)
    records = standing(PROOFS, read(options.results))
    report.write(PROOFS, records, options.docs)
    return 0 if options.report or all(p.key in records and records[p.key].passed for p in chosen) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the learning proofs that are missing.")
    parser.add_argument("--only", default="", help="proofs whose title holds this text, such as 'Acrobot-v1'")
    parser.add_argument("--retry", action="store_true", help="also those that were run and did not pass")
    parser.add_argument("--report", action="store_true", help="run nothing, only write docs/algorithms.md")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results.jsonl")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    return parser.parse_args()


def run(proof: Proof, program: Sequence[str]) -> Record:
    """Run one proof with `program` (the start of the command line) and say what came of it.

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


def _outcome(record: Record) -> str:
    if "error" in record.result:
        return f"exit {record.result['exit']}: {record.result['error']}"
    evaluation = record.result["evaluation"] or {"mean": float("nan")}
    steps, seconds = record.result["env_steps"], record.result["training_seconds"] or float("nan")
    return f"evaluation {evaluation['mean']:.1f} after {steps:,} steps, {seconds:.1f} s of training"


if __name__ == "__main__":
    sys.exit(main())
