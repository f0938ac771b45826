"""Write the section of `docs/algorithms.md` on the ablation over staleness."""

import statistics
from collections.abc import Sequence
from itertools import product

from benchmarks import staleness
from benchmarks.staleness import Lagged

HEAD = """
## Decoupled and coupled objective on stale experience

`make staleness` repeats the ablation of Hilton, Cobbe and Schulman 2021, in which the behaviour policy's
weights are exactly so many updates behind, and writes
[`staleness.jsonl`](../benchmarks/results/staleness.jsonl). It runs in one process with this project's PPO and
its settings for the task, for {steps:,} environment steps, with the same seeds for both objectives. Dots are
seeds, lines go through their means; [every learning curve](images/staleness-curves.png).

![Mean return over the second half of the steps against staleness, a panel per task](images/staleness.png)

Median over seeds (lowest to highest). Returns are averages of the curve over the first quarter and the second
half of the steps, and its last point. KL(μ‖π) in nats and effective sample size of π/μ, as a share of the
batch, are medians over updates; π is the policy in an update's last epoch.
"""

TABLE = """
| updates behind | objective | seeds | first quarter | second half | end | KL(μ‖π) | sample size |
|---|---|---|---|---|---|---|---|
"""

SEEN = """
0 updates behind both objectives are the same function, so their difference there is what rounding grows into.

"""


def section(runs: Sequence[Lagged]) -> str:
    """Return the section; "" where there are no runs."""
    if not runs:
        return ""
    text = HEAD.format(steps=max(run.total_steps for run in runs))
    return text + "".join(_task(task, runs) for task in staleness.TASKS) + _missing(runs)


def _task(task: str, runs: Sequence[Lagged]) -> str:
    mine = [run for run in runs if run.task == task]
    if not mine:
        return ""
    rows = product(staleness.STALENESS, staleness.OBJECTIVES)
    found = [[r for r in mine if (r.staleness, r.objective) == row] for row in rows]
    table = f"\n### {task}\n" + TABLE + "".join(_row(group) for group in found if group)
    return table + SEEN + "".join(_compared(task, lag, mine) for lag in staleness.STALENESS if lag > 0)


def _row(group: Sequence[Lagged]) -> str:
    cells = [
        str(group[0].staleness),
        group[0].objective,
        str(len(group)),
        _spread([run.early_return for run in group], ".0f"),
        _spread([run.mean_return for run in group], ".0f"),
        _spread([run.final_return for run in group], ".0f"),
        _spread([run.divergence for run in group], ".3f"),
        _spread([run.sample_share for run in group], ".2f"),
    ]
    return f"| {' | '.join(cells)} |\n"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _compared(task: str, lag: int, runs: Sequence[Lagged]) -> str:
    """Return, seed by seed, how often the decoupled objective was ahead, and how often either fell back."""
    found = {run.key: run for run in runs}
    pairs = [
        (found[task, "decoupled", lag, seed], found[task, "coupled", lag, seed])
        for seed in staleness.SEEDS
        if {(task, "decoupled", lag, seed), (task, "coupled", lag, seed)} <= found.keys()
    ]
    if not pairs:
        return ""
    limits = staleness.TASKS[task]
    early = sum(decoupled.early_return > coupled.early_return for decoupled, coupled in pairs)
    late = sum(decoupled.mean_return > coupled.mean_return for decoupled, coupled in pairs)
    fallen = [sum(pair[side].collapsed for pair in pairs) for side in (0, 1)]
    return (
        f"- {lag} updates behind: decoupled is ahead in {early} of {len(pairs)} seeds over the first "
        f"quarter, in {late} over the second half. The mean return fell below {limits.fallen:g} after it had "
        f"been above {limits.learned:g} in {fallen[0]} decoupled and {fallen[1]} coupled runs.\n"
    )


def _missing(runs: Sequence[Lagged]) -> str:
    absent = len(staleness.keys()) - len({run.key for run in runs} & set(staleness.keys()))
    return f"\nNot run yet: {absent} of {len(staleness.keys())} runs of the ablation.\n" if absent else ""
