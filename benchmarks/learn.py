"""Run every learning proof without a record in `benchmarks/results/`, then write `docs/algorithms.md`.

Each proof is one `penstock train … --json` in a temporary folder, and one line appended when it ends:
stop at any time and start again. `python -m benchmarks.learn --help` lists the choices.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.proof_records import DOCS, RESULTS, Record, append, missing, read, standing
from benchmarks.proof_run import PENSTOCK, run
from benchmarks.proofs import PROOFS


def main() -> int:
    """Return 0 when every proof that was asked for has passed."""
    options = _parse()
    chosen = [p for p in PROOFS if options.only in f"{p.title} {p.algorithm} seed {p.seed}"]
    path = options.results / "proofs.jsonl"
    todo = missing(chosen, read(path), retry=options.retry)
    for number, proof in enumerate([] if options.report else todo, 1):
        print(f"[{number}/{len(todo)}] {proof.title}, {proof.algorithm}, seed {proof.seed} …", flush=True)
        record = run(proof, PENSTOCK)
        append(path, record)
        print(f"    {'passed' if record.passed else 'NOT passed'}: {_outcome(record)}", flush=True)
    records = standing(PROOFS, read(path))
    report.write(PROOFS, records, results=options.results, docs=options.docs)
    return 0 if options.report or all(p.key in records and records[p.key].passed for p in chosen) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the learning proofs that are missing.")
    parser.add_argument("--only", default="", help="proofs whose title holds this text, such as 'Acrobot-v1'")
    parser.add_argument("--retry", action="store_true", help="also those that were run and did not pass")
    parser.add_argument("--report", action="store_true", help="run nothing, only write docs/algorithms.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    return parser.parse_args()


def _outcome(record: Record) -> str:
    if "error" in record.result:
        return f"exit {record.result['exit']}: {record.result['error']}"
    evaluation = record.result["evaluation"] or {"mean": float("nan")}
    steps, seconds = record.result["env_steps"], record.result["training_seconds"] or float("nan")
    return f"evaluation {evaluation['mean']:.1f} after {steps:,} steps, {seconds:.1f} s of training"


if __name__ == "__main__":
    sys.exit(main())
