"""Train both objectives of PPO on experience that lags exactly n updates behind the learner.

This follows Hilton, Cobbe and Schulman 2021 (`ppo-ewma`); see `benchmarks.lagged`. Each run appends one line
to `benchmarks/results/staleness.jsonl`, so the series may be stopped at any time and started again. At the
end it draws the pictures; `make staleness` also writes the section of `docs/algorithms.md`.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from benchmarks import staleness_pictures
from benchmarks.lagged import learn
from benchmarks.proof_records import DOCS, RESULTS, commit, machine, thin
from learner.model.device import use_threads
from penstock.config.settings import Settings, load
from workloads.control.defaults import for_environment

OBJECTIVES, STALENESS, SEEDS = ("decoupled", "coupled"), (0, 1, 2, 4, 8, 16, 32), (1, 2, 3)
Key = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The range of a task's returns.

    learned, fallen: returns above and below which a run has learned, and has fallen back.
    lowest, highest: bounds of a return.
    """

    total_steps: int
    learned: float
    fallen: float
    lowest: float
    highest: float


TASKS = {
    "CartPole-v1": Task(total_steps=300_000, learned=200, fallen=50, lowest=0, highest=500),
    "Acrobot-v1": Task(total_steps=300_000, learned=-150, fallen=-350, lowest=-500, highest=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagged:
    """One run. curve: (environment steps, mean return of the last 100 training episodes).

    mean_return: the curve's average over the second half of the steps. divergence (KL(μ‖π_θ), nats) and
    sample_share (effective sample size of π_θ/μ, 0..1): medians over updates.
    """

    task: str = "CartPole-v1"
    objective: str
    staleness: int
    seed: int
    total_steps: int
    updates: int
    mean_return: float
    final_return: float
    divergence: float
    sample_share: float
    seconds: float
    commit: str
    date: str
    machine: str
    curve: list[tuple[int, float]]

    @property
    def key(self) -> Key:
        """Return the key that makes two runs the same entry."""
        return self.task, self.objective, self.staleness, self.seed

    @property
    def early_return(self) -> float:
        """Return the curve's average over the first quarter of the steps.

        NaN where no episode ended in it.
        """
        returns = [y for x, y in self.curve if x <= self.total_steps / 4]
        return statistics.fmean(returns) if returns else math.nan

    @property
    def collapsed(self) -> bool:
        """Return whether it fell back after it had learned."""
        task, returns = TASKS[self.task], [y for _, y in self.curve]
        learned = next((i for i, y in enumerate(returns) if y > task.learned), len(returns))
        return any(y < task.fallen for y in returns[learned:])


def keys() -> list[Key]:
    """Return every run of the ablation."""
    return list(product(TASKS, OBJECTIVES, STALENESS, SEEDS))


def train(task: str, objective: str, staleness: int, seed: int, total_steps: int) -> Lagged:
    """Run `total_steps` environment steps; raises RuntimeError when an update was not applied."""
    began = time.monotonic()
    learned = learn(_settings(task, objective, seed, total_steps), staleness)
    curve = [(x, y) for x, y in learned.curve if not math.isnan(y)]
    return Lagged(
        task=task,
        objective=objective,
        staleness=staleness,
        seed=seed,
        total_steps=total_steps,
        updates=len(learned.metrics),
        mean_return=round(statistics.fmean(y for x, y in curve if x >= total_steps / 2), 1),
        final_return=round(curve[-1][1], 1),
        divergence=round(statistics.median(m["kl_behaviour"] for m in learned.metrics), 5),
        sample_share=round(statistics.median(m["effective_sample_size"] for m in learned.metrics), 3),
        seconds=round(time.monotonic() - began, 1),
        commit=commit(),
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        curve=thin([(x, round(y, 1)) for x, y in curve]),
    )


def _settings(task: str, objective: str, seed: int, total_steps: int) -> Settings:
    over = {
        "run": "staleness",
        "seed": seed,
        "environment": {"id": task},
        "algorithm": {"objective": objective},
        "learner": {"device": "cpu", "total_steps": total_steps},
    }
    return load([for_environment(task, "ppo"), over])


def read(path: Path) -> dict[Key, Lagged]:
    """Return the newest run of every entry; an absent file holds none."""
    if not path.exists():
        return {}
    runs = (Lagged(**json.loads(line)) for line in path.read_text().splitlines() if line)
    return {run.key: run for run in runs}


def draw(runs: Sequence[Lagged], folder: Path) -> None:
    """Draw `staleness.png`, returns against staleness, and `staleness-curves.png`, returns over steps."""
    folder.mkdir(parents=True, exist_ok=True)
    limits = {name: (task.lowest, task.highest) for name, task in TASKS.items()}
    staleness_pictures.summary(runs, limits, STALENESS, OBJECTIVES, folder / "staleness.png")
    staleness_pictures.curves(runs, limits, STALENESS, OBJECTIVES, folder / "staleness-curves.png")


def main() -> None:
    """Run what is missing, then draw."""
    options = _parse()
    use_threads(Settings())
    done = read(options.results)
    todo = [key for key in keys() if key not in done and options.only in key[0]]
    for number, (task, objective, staleness, seed) in enumerate([] if options.draw else todo, 1):
        print(f"[{number}/{len(todo)}] {task}, {objective}, staleness {staleness}, seed {seed} …", flush=True)
        run = train(task, objective, staleness, seed, options.total_steps or TASKS[task].total_steps)
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        print(
            f"    mean return {run.mean_return}, at the end {run.final_return}, {run.seconds} s", flush=True
        )
    draw(list(read(options.results).values()), options.pictures)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness", description="Run what is missing."
    )
    parser.add_argument("--only", default="", help="tasks whose name holds this text, such as 'Acrobot'")
    parser.add_argument("--draw", action="store_true", help="run nothing, only draw")
    parser.add_argument("--results", type=Path, default=RESULTS / "staleness.jsonl", help="file of the runs")
    parser.add_argument("--pictures", type=Path, default=DOCS / "images", help="folder of the pictures")
    parser.add_argument(
        "--total-steps", type=int, help="environment steps of a run; the task's own unless said"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
