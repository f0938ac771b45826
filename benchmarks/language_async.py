"""Asynchronous against synchronous on a language model: rate and final true reward at equal samples.

Sentiment words (`language_words`), whole runs of `penstock train`: the default staleness beside lock-step, in
which actor and learner take turns. A fragment is a batch in both, so both make the same updates of the same
size, with one epoch, so that a batch takes about as long to generate as to train. Each arm has the number of
threads that was fastest in a short run before. The reward is the true one, so that only the two are at
work.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.table import Cell, Options, Table
from benchmarks.training import PENSTOCK

ARMS: Final = {"asynchronous": (), "synchronous": ("--set", "algorithm.staleness=0")}
AIM: Final = 1.3
THREADS: Final = (1, 2)
TOKENS: Final = 100_000
SHORT_TOKENS: Final = 30_000
EPISODES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Numbers of threads of the processes that generate and train."""

    actor: int
    learner: int

    def options(self) -> tuple[str, ...]:
        """Return the options of `penstock train`."""
        return ("--set", f"actor.threads={self.actor}", "--set", f"learner.threads={self.learner}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run.

    rate: sampled tokens per second of training. busy: share of that in which the learner computed.
    """

    rate: float
    reward: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of training. runs: one for each seed, in order."""

    threads: Threads
    runs: Sequence[Outcome]

    @property
    def reward(self) -> float:
        """Return the mean over seeds."""
        return statistics.fmean(run.reward for run in self.runs)

    @property
    def error(self) -> float:
        """Return the standard error of that mean; infinite for one seed."""
        if len(self.runs) < 2:
            return math.inf
        return statistics.stdev(run.reward for run in self.runs) / math.sqrt(len(self.runs))


def table(options: Options) -> Table:
    """Return a row for each arm; `--repeat` sets the number of seeds."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "benchmarks.language_words", name], check=True)
        recipe = folder / "recipe.toml"
        recipe.write_text(_RECIPE.format(model=folder / "model", prompts=folder / "prompts.jsonl"))
        threads = {arm: _best_threads(recipe, arm) for arm in ARMS}
        runs: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
        for seed in range(1, options.repeat + 1):
            for arm in ARMS:
                runs[arm].append(_run(recipe, arm, threads[arm], seed, TOKENS, EPISODES))
    return summarise({arm: Arm(threads=threads[arm], runs=runs[arm]) for arm in ARMS})


def summarise(arms: dict[str, Arm]) -> Table:
    """Return the table of outcomes.

    The ratio of rates is taken within a seed and its median shown; the rewards differ by so many standard
    errors.
    """
    ours, theirs = (arms[name] for name in ARMS)
    ratio = statistics.median(a.rate / b.rate for a, b in zip(ours.runs, theirs.runs, strict=True))
    between = math.hypot(ours.error, theirs.error)
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            f"actor {arm.threads.actor}, learner {arm.threads.learner}",
            statistics.median(run.rate for run in arm.runs),
            ratio if arm is ours else None,
            arm.reward,
            arm.error if math.isfinite(arm.error) else None,
            statistics.median(run.busy for run in arm.runs),
        )
        for name, arm in arms.items()
    ]
    apart = abs(ours.reward - theirs.reward) / between if between else 0.0
    return Table(
        title=f"Sentiment words, {TOKENS:,} sampled tokens, {len(ours.runs)} seeds",
        columns=(
            "arm",
            "threads",
            "tokens/s",
            "÷ synchronous",
            "true reward",
            "± standard error",
            "learner computes",
        ),
        rows=rows,
        note=(
            f"aims: {AIM} × the rate, rewards within one standard error of their difference: {apart:.2f} "
            "apart"
        ),
    )


def _best_threads(recipe: Path, arm: str) -> Threads:
    settings = [Threads(actor=a, learner=b) for a, b in itertools.product(THREADS, THREADS)]
    return max(settings, key=lambda threads: _run(recipe, arm, threads, 0, SHORT_TOKENS, 1).rate)


def _run(recipe: Path, arm: str, threads: Threads, seed: int, tokens: int, episodes: int) -> Outcome:
    """Run once; raises RuntimeError with the last line of its error output when it fails."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        run = Path(name) / "run"
        command = (
            PENSTOCK,
            "train",
            str(recipe),
            "--seed",
            str(seed),
            "--total-steps",
            str(tokens),
            "--json",
        )
        more = ("--run-dir", str(run), "--set", f"evaluation.episodes={episodes}", *threads.options())
        done = subprocess.run((*command, *more, *ARMS[arm]), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no error output"])[-1])
        summary: dict[str, Any] = json.loads(done.stdout)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        rate=summary["env_steps_per_second"],
        reward=summary["evaluation"]["mean"],
        busy=sum(line["compute_seconds"] for line in lines) / summary["training_seconds"],
    )


_RECIPE: Final = """
workload = "rlhf"
run = "bench"

[environment]
id = "sentiment-words"
count = 128

[environment.kwargs]
model = "{model}"
prompts = "{prompts}"
reward = "workloads.rlhf.sentiment:true_rewards"
response_tokens = 12

[policy.kwargs]
rank = 8
alpha = 16.0

[actor]
count = 1
unroll_length = 14

[algorithm]
name = "token_ppo"
batch_steps = 1792
epochs = 1
kl_coefficient = 0.05
learning_rate = 2e-3
critic_learning_rate = 2e-3
"""
