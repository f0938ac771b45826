"""Learning proofs: which task each algorithm must solve, from which seeds, within how many steps.

`make learn` runs every proof without a record in `benchmarks/results/proofs.jsonl`, each as one
`penstock train … --json`, appends its record, and writes the results into `docs/algorithms.md`. Stop it at
any time and start it again.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.stand import PENSTOCK

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
RESULTS: Final = ROOT / "benchmarks" / "results" / "proofs.jsonl"
CURVE_POINTS: Final = 60
KEPT: Final = (
    "solved", "mean_return", "evaluation", "env_steps", "updates", "wall_seconds", "training_seconds",
    "solved_at", "env_steps_per_second", "staleness", "ledger",
)  # fmt: skip
"""Fields of `summary.json` that a record has."""

Key = tuple[str, str, str, int]
"""Task, algorithm, variant and seed."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One run of `penstock train` that must end with an evaluation of at least `threshold`.

    at_most: instead, a bound that the evaluation must not exceed: the run shows what cannot be learned.
    variant: difference to the plain run of that task, "" for none. options: further arguments.
    """

    task: str
    algorithm: str
    seed: int
    threshold: float
    total_steps: int
    variant: str = ""
    options: tuple[str, ...] = ()
    at_most: float | None = None

    def passes(self, evaluation: float | None) -> bool:
        if evaluation is None:
            return False
        return evaluation >= self.threshold if self.at_most is None else evaluation <= self.at_most

    @property
    def wanted(self) -> str:
        return f"≥ {self.threshold:g}" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def key(self) -> Key:
        return self.task, self.algorithm, self.variant, self.seed

    @property
    def title(self) -> str:
        name = self.task.rpartition(":")[2]
        return f"{name}, {self.variant}" if self.variant else name

    @property
    def command(self) -> str:
        """Return the command as a person types it."""
        return f"penstock {' '.join(self.arguments())}"

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments behind `penstock`, without the folder of the run."""
        algorithm = () if self.algorithm == "ppo" else ("--set", f"algorithm.name={self.algorithm}")
        bounds = ("--target-return", f"{self.threshold:g}", "--total-steps", str(self.total_steps))
        return ("train", self.task, "--seed", str(self.seed), *bounds, *algorithm, *self.options, "--json")


SOURCES = {
    "CartPole-v1": "Gymnasium's own threshold; RL Baselines3 Zoo: PPO 500, A2C 500",
    "Acrobot-v1": "Gymnasium's own threshold; RL Baselines3 Zoo: PPO −73.5, A2C −83.4",
    "MountainCar-v0": "Gymnasium's own threshold; RL Baselines3 Zoo: DQN −100.8, PPO −110.4",
    "Pendulum-v1": "RL Baselines3 Zoo: PPO −172.2, SAC −157.0",
    "LunarLander-v3": "Gymnasium's own threshold is 200; RL Baselines3 Zoo: PPO 242.1, DQN 154.4 (v2)",
    "BipedalWalker-v3": "RL Baselines3 Zoo: PPO 213.3",
    "HalfCheetah-v5": "RL Baselines3 Zoo: PPO 5,819, A2C 3,041, SAC 9,535 at 1M (v3)",
    "Hopper-v5": "RL Baselines3 Zoo: PPO 2,410, SAC 2,326 at 1M (v3)",
}
"""Published results for the task, for the page: github.com/DLR-RM/rl-baselines3-zoo, `benchmark.md`."""


def _entry(
    task: str,
    threshold: float,
    total_steps: int,
    *options: str,
    variant: str = "",
    seeds: int = 5,
    algorithm: str = "ppo",
    at_most: float | None = None,
) -> list[Proof]:
    return [
        Proof(task, algorithm, seed, threshold, total_steps, variant, options, at_most)
        for seed in range(1, 1 + seeds)
    ]


CARTPOLE: Final = ("CartPole-v1", 475, 150_000)
PROOFS: Final[tuple[Proof, ...]] = (
    *_entry(*CARTPOLE),
    *_entry(*CARTPOLE, "--actors", "1", variant="1 actor"),
    *_entry(*CARTPOLE, "--actors", "8", variant="8 actors"),
    *_entry("CartPole-v1", 475, 500_000, algorithm="impala"),
    *_entry("CartPole-v1", 475, 500_000, algorithm="reinforce"),
    *_entry("Acrobot-v1", -100, 500_000),
    *_entry("Pendulum-v1", -250, 500_000),
    *_entry("LunarLander-v3", 230, 1_500_000),
    *_entry("BipedalWalker-v3", 200, 5_000_000, seeds=1),
    *_entry("HalfCheetah-v5", 1_500, 1_000_000, seeds=3),
    *_entry("Hopper-v5", 1_500, 1_000_000, seeds=2),
    # With images and parts: the optimum is 1 for Catch, 7/12 on average for Courier.
    *_entry("Catch-v0", 0.95, 200_000, seeds=3),
    *_entry(
        "Catch-v0", 0.95, 200_000, "--set", "policy.image_trunk=impala",
        variant="IMPALA's trunk", seeds=3,
    ),
    *_entry("Courier-v0", 0.5, 200_000, seeds=3),
    *_entry(*CARTPOLE, "--set", "policy.hidden_norm=layer", variant="layer norm", seeds=3),
    *_entry(*CARTPOLE, "--set", "policy.hidden_norm=batch", variant="batch norm", seeds=3),
    *_entry(*CARTPOLE, "--set", "policy.dropout=0.1", variant="dropout of 10%", seeds=3),
    *_entry("MountainCar-v0", -110, 120_000, algorithm="dqn"),
    *_entry("LunarLander-v3", 200, 300_000, algorithm="dqn"),
    *_entry("Pendulum-v1", -180, 20_000, algorithm="sac"),
    *_entry("HalfCheetah-v5", 4_000, 300_000, seeds=1, algorithm="sac"),
    *_entry("Hopper-v5", 1_500, 200_000, seeds=1, algorithm="sac"),
    *_entry("Recall-v0", 0.95, 300_000),
    # Not learned without what the task needs: a quarter of 100 questions, and three standard deviations.
    *_entry(
        "Recall-v0", 0.95, 300_000, "--set", "policy.recurrent=none",
        variant="without memory", at_most=0.38,
    ),
    *_entry("Menu-v0", 7.78, 100_000),
    *_entry(
        "Menu-v0", 7.78, 100_000, "--set", "environment.mask_key=",
        variant="without masks", at_most=1.0,
    ),
)  # fmt: skip


# ---- records


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of a proof, one line of `proofs.jsonl`.

    passed: the evaluation reached the threshold within the steps. curve: (environment steps, mean return of
    the last 100 episodes), at most CURVE_POINTS.
    """

    task: str
    algorithm: str
    variant: str
    seed: int
    command: str
    commit: str
    date: str
    machine: str
    passed: bool
    result: dict[str, Any]
    curve: list[tuple[int, float]]

    @property
    def key(self) -> Key:
        return self.task, self.algorithm, self.variant, self.seed


Records = dict[Key, Record]


def read(path: Path) -> Records:
    """Return the newest record of every entry; an absent file holds none."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = (Record(**json.loads(line)) for line in lines if line)
    return {record.key: record for record in records}


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def standing(proofs: Iterable[Proof], records: Records) -> Records:
    """Return the records of the proofs as they are now: one of another threshold or budget proves nothing."""
    found = ((proof, records.get(proof.key)) for proof in proofs)
    return {proof.key: record for proof, record in found if record and record.command == proof.command}


def missing(proofs: Sequence[Proof], records: Records, *, retry: bool) -> list[Proof]:
    """Return proofs without a record; with `retry` also those whose newest record did not pass."""
    stand = standing(proofs, records)
    return [proof for proof in proofs if proof.key not in stand or (retry and not stand[proof.key].passed)]


def thin(points: Sequence[tuple[int, float]], count: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """Return at most `count` of the points, evenly, with the first and the last."""
    if len(points) <= count:
        return list(points)
    return [points[round(index * (len(points) - 1) / (count - 1))] for index in range(count)]


# ---- runs


def run(proof: Proof, program: Sequence[str] = (PENSTOCK,)) -> Record:
    """Run one proof; a run that fails is a record too, with the last line of its error output."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        command = [*program, *proof.arguments(), "--run-dir", str(Path(folder) / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        curve = _curve(Path(folder) / "run" / "metrics.jsonl")
    summary = _summary(done)
    return Record(
        task=proof.task, algorithm=proof.algorithm, variant=proof.variant, seed=proof.seed,
        command=proof.command, commit=_commit(), date=datetime.now(UTC).date().isoformat(),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        passed=proof.passes((summary.get("evaluation") or {}).get("mean")), result=summary, curve=curve,
    )  # fmt: skip


def _summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        return {"exit": done.returncode, "error": reason}
    summary = json.loads(done.stdout)
    return {name: summary.get(name) for name in KEPT}


def _curve(path: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    points = [(row["env_steps"], row["mean_return"]) for row in rows if row.get("mean_return") is not None]
    return thin([(int(steps), round(float(mean), 3)) for steps, mean in points])


def _commit() -> str:
    """Return the commit, with a "+" when the tree holds changes that it does not."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":!docs", ":!benchmarks/results")
    return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if dirty.strip() else "")


# ---- the page

MARKS: Final = ("<!-- proofs -->\n", "<!-- end of proofs -->\n")
"""What `algorithms.md` has between them is written; the rest of the page is text."""
COLUMNS: Final = (
    "task", "algorithm", "threshold", "passed", "evaluation (median)", "steps (median)",
    "training seconds (median)", "published",
)  # fmt: skip


def write(proofs: Sequence[Proof], records: Records, docs: Path = DOCS) -> None:
    """Write the results into `algorithms.md` and its picture of curves, in the folder `docs`."""
    panels = [(group[0], [records[p.key] for p in group if p.key in records]) for group in _groups(proofs)]
    _draw(panels, docs / "images" / "proofs.png")
    page = docs / "algorithms.md"
    page.write_text(written(page.read_text(), proofs, records))


def written(page: str, proofs: Sequence[Proof], records: Records) -> str:
    """Return the text of `algorithms.md` with these results between its marks."""
    before, after = page.partition(MARKS[0])[0], page.partition(MARKS[1])[2]
    groups = _groups(proofs)
    head = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    rows = "".join(_row(group, records) for group in groups)
    absent = "".join(_absent(group, records) for group in groups) or "Nothing.\n"
    lines = [f"# seeds {', '.join(str(p.seed) for p in group)}\n{group[0].command}\n" for group in groups]
    results = f"\n{head}{rows}\n## Missing\n\n{absent}\n## Commands\n\n```sh\n{''.join(lines)}```\n\n"
    return f"{before}{MARKS[0]}{results}{MARKS[1]}{after}"


def _groups(proofs: Sequence[Proof]) -> list[list[Proof]]:
    """Return the proofs grouped by all but their seed."""
    groups: dict[tuple[str, str, str], list[Proof]] = {}
    for proof in proofs:
        groups.setdefault((proof.task, proof.algorithm, proof.variant), []).append(proof)
    return list(groups.values())


def _row(group: list[Proof], records: Records) -> str:
    first, found = group[0], [records[proof.key] for proof in group if proof.key in records]
    ended = [one.result for one in found if "error" not in one.result and one.result["evaluation"]]
    cells = [
        first.title,
        f"`{first.algorithm}`",
        f"{first.wanted} within {first.total_steps:,}",
        f"{sum(record.passed for record in found)} of {len(group)}",
        _median([result["evaluation"]["mean"] for result in ended], "{:,.1f}"),
        _median([result["env_steps"] for result in ended], "{:,.0f}"),
        _median([_seconds(result) for result in ended], "{:,.1f}"),
        SOURCES.get(first.task, "–"),
    ]
    return f"| {' | '.join(cells)} |\n"


def _seconds(result: dict[str, Any]) -> float | None:
    """Return the seconds until the version that solved the task was made, else until the end."""
    solved = result.get("solved_at")
    seconds: float | None = solved["seconds"] if solved else result["training_seconds"]
    return seconds


def _median(values: list[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    return form.format(median(numbers)) if numbers else "–"


def _absent(group: list[Proof], records: Records) -> str:
    absent = [str(p.seed) for p in group if p.key not in records]
    failed = [str(p.seed) for p in group if p.key in records and not records[p.key].passed]
    parts = [f"not run: seed {', '.join(absent)}"] if absent else []
    parts += [f"not passed: seed {', '.join(failed)}"] if failed else []
    return f"- {group[0].title}, `{group[0].algorithm}`: {'; '.join(parts)}\n" if parts else ""


def _draw(panels: Sequence[tuple[Proof, Sequence[Record]]], path: Path) -> None:
    """Draw the mean return of the last 100 training episodes: a panel per entry, a line per seed."""
    rows = math.ceil(len(panels) / 4)
    figure = Figure(figsize=(12.8, 2.3 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 4, squeeze=False).flat)
    for axis, (proof, records) in zip(axes, panels, strict=False):
        for record in records:
            axis.plot(*zip(*record.curve, strict=True), linewidth=1)
        bound = proof.threshold if proof.at_most is None else proof.at_most
        axis.axhline(bound, color="black", linestyle="--", linewidth=0.8)
        axis.set_title(f"{proof.title}, {proof.algorithm}", fontsize="small")
        axis.tick_params(labelsize="small")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("environment steps")
    figure.supylabel("mean return of 100 training episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


# ---- the command


def main() -> int:
    """Return 0 when every proof that was asked for has passed."""
    options = _parse()
    chosen = [p for p in PROOFS if options.only in f"{p.title} {p.algorithm} seed {p.seed}"]
    todo = [] if options.report else missing(chosen, read(options.results), retry=options.retry)
    for number, proof in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {proof.title}, {proof.algorithm}, seed {proof.seed} …", flush=True)
        record = run(proof)
        append(options.results, record)
        print(f"    {'passed' if record.passed else 'NOT passed'}: {_outcome(record.result)}", flush=True)
    records = standing(PROOFS, read(options.results))
    write(PROOFS, records, options.docs)
    return 0 if options.report or all(p.key in records and records[p.key].passed for p in chosen) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the learning proofs that are missing.")
    parser.add_argument("--only", default="", help="proofs whose title holds this text, such as 'Acrobot-v1'")
    parser.add_argument("--retry", action="store_true", help="also those that were run and did not pass")
    parser.add_argument("--report", action="store_true", help="run nothing, only write docs/algorithms.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the records")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    return parser.parse_args()


def _outcome(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"exit {result['exit']}: {result['error']}"
    mean = (result["evaluation"] or {"mean": math.nan})["mean"]
    seconds = result["training_seconds"] or math.nan
    return f"evaluation {mean:.1f} after {result['env_steps']:,} steps, {seconds:.1f} s of training"


if __name__ == "__main__":
    sys.exit(main())
