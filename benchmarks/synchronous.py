"""Asynchronous against synchronous at equal steps: the default staleness beside lock-step (staleness 0).

Three tasks, five seeds, whole runs of `penstock train` that no target ends. A round of lock-step has one
fragment of every worker, so the number of workers makes it as large as a batch: both arms make the same
updates of the same size. What is compared is the last version's evaluation. One line of
`benchmarks/results/synchronous.jsonl` per run: stop at any time and start again.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.proof_records import RESULTS, Record, append, missing, read, standing
from benchmarks.proof_run import PENSTOCK, run
from benchmarks.proofs import SEEDS, Proof

PATH: Final = RESULTS / "synchronous.jsonl"
ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
ALLOWED_LOSS: Final = 0.05
_RESAMPLES: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Mean evaluations of both arms, over seeds. difference, low, high: asynchronous less synchronous.

    They are shares of the synchronous mean's size: −0.05 is a loss of 5%; low to high is the 95% interval.
    """

    task: str
    total_steps: int
    seeds: int
    asynchronous: float
    synchronous: float
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return whether a loss of at most ALLOWED_LOSS fills the interval, lies in it, or does not."""
        if self.high < -ALLOWED_LOSS:
            return "excluded"
        return "certain" if self.low >= -ALLOWED_LOSS else "possible"


def _runs(task: str, threshold: float, total_steps: int, actors: int) -> list[Proof]:
    options = ("--actors", str(actors), "--set", "learner.stop_at_target=false")
    lock_step = ("--set", "algorithm.staleness=0")
    return [
        Proof(
            task=task,
            algorithm="ppo",
            variant=variant,
            seed=seed,
            threshold=threshold,
            total_steps=total_steps,
            options=(*options, *(lock_step if variant == SYNCHRONOUS else ())),
        )
        for seed in SEEDS
        for variant in (ASYNCHRONOUS, SYNCHRONOUS)
    ]


RUNS: tuple[Proof, ...] = (
    *_runs("CartPole-v1", 475, 100_000, actors=1),
    *_runs("Acrobot-v1", -100, 200_000, actors=2),
    *_runs("Pendulum-v1", -250, 200_000, actors=4),
)


def compare(task: str, records: Sequence[Record]) -> Comparison | None:
    """Compare the runs of a task; None where an arm has fewer than two that ended well."""
    arms = {
        variant: np.array(
            [
                mean
                for r in records
                if (r.task, r.variant) == (task, variant) and (mean := _mean(r)) is not None
            ]
        )
        for variant in (ASYNCHRONOUS, SYNCHRONOUS)
    }
    if min(map(len, arms.values())) < 2:
        return None
    ours, theirs = arms[ASYNCHRONOUS], arms[SYNCHRONOUS]
    low, high = interval(ours, theirs)
    scale = abs(theirs.mean())
    return Comparison(
        task=task,
        total_steps=next(proof.total_steps for proof in RUNS if proof.task == task),
        seeds=min(len(ours), len(theirs)),
        asynchronous=float(ours.mean()),
        synchronous=float(theirs.mean()),
        difference=float((ours.mean() - theirs.mean()) / scale),
        low=low / scale,
        high=high / scale,
    )


def interval(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the 95% percentile bootstrap of mean(first) − mean(second).

    Each arm's seeds are drawn on their own.

    Efron and Tibshirani 1993, chapter 13. Both [n]; the same numbers give the same interval.
    """
    random = np.random.default_rng(0)
    drawn = [arm[random.integers(0, len(arm), (_RESAMPLES, len(arm)))].mean(1) for arm in (first, second)]
    low, high = np.percentile(drawn[0] - drawn[1], [2.5, 97.5])
    return float(low), float(high)


def _mean(record: Record) -> float | None:
    evaluation = record.result.get("evaluation") or {}
    return evaluation.get("mean")


def main() -> int:
    """Return 0 when every comparison that was asked for leaves room for a loss of at most ALLOWED_LOSS."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.synchronous", description="Run what is missing, then compare."
    )
    parser.add_argument("--only", default="", help="tasks whose name holds this text, such as 'Acrobot'")
    parser.add_argument("--results", type=Path, default=PATH, help="file of the runs")
    options = parser.parse_args()
    chosen = [proof for proof in RUNS if options.only in proof.task]
    todo = missing(chosen, read(options.results), retry=False)
    for number, proof in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {proof.title}, seed {proof.seed} …", flush=True)
        record = run(proof, PENSTOCK)
        append(options.results, record)
        print(f"    evaluation {_mean(record)}", flush=True)
    records = standing(RUNS, read(options.results))
    compared = [compare(task, list(records.values())) for task in dict.fromkeys(p.task for p in chosen)]
    for comparison in filter(None, compared):
        print(row(comparison), end="")
    return (
        0
        if all(comparison is not None and comparison.verdict != "excluded" for comparison in compared)
        else 1
    )


HEAD = """
## Asynchronous and synchronous

`make synchronous` compares the default staleness (1) with lock-step (0) at equal steps and batches, and
writes [`synchronous.jsonl`](../benchmarks/results/synchronous.jsonl). Means over seeds of the last version's
evaluation; the difference is a share of the synchronous mean, its interval a 95% bootstrap over seeds. A loss
of at most {allowed:.0%} is certain where the whole interval lies above it, possible where a part does.

| task | steps | seeds | asynchronous | synchronous | difference | 95% interval | loss ≤ {allowed:.0%} |
|---|---|---|---|---|---|---|---|
"""


def section(path: Path = PATH) -> str:
    """Return the section of `docs/algorithms.md`; "" where there are no runs."""
    records = list(standing(RUNS, read(path)).values())
    compared = [compare(task, records) for task in dict.fromkeys(proof.task for proof in RUNS)]
    rows = [row(comparison) for comparison in compared if comparison is not None]
    if not rows:
        return ""
    absent = len(RUNS) - len(records)
    note = f"\nNot run yet: {absent} of {len(RUNS)} runs.\n" if absent else ""
    return HEAD.format(allowed=ALLOWED_LOSS) + "".join(rows) + note


def row(compared: Comparison) -> str:
    """Return a line of the table."""
    cells = [
        compared.task,
        f"{compared.total_steps:,}",
        str(compared.seeds),
        f"{compared.asynchronous:.1f}",
        f"{compared.synchronous:.1f}",
        f"{compared.difference:+.1%}",
        f"{compared.low:+.1%} to {compared.high:+.1%}",
        compared.verdict,
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(main())
