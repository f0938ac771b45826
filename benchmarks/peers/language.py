"""GRPO of a small GPT-2 by Penstock and by TRL, alternately on this machine: `make bench-peers`.

Both start from one model (`language_task`), sample 32 tokens to 16 prompts eight times each, reward them by
one function (`liked`), and make one gradient step of all weights on these 128 responses, in float32, with
advantages relative to the group and no penalty: what TRL does when it is told nothing. Ours does it with all
processes that `penstock train` starts. Rates are of tokens that were sampled and trained, behind a warm-up,
start-up excluded.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.endurance import PROCESSES, EndlessRun
from benchmarks.peers import ENVIRONMENTS, HERE, PENSTOCK, shell
from benchmarks.table import Cell, Options, Table

PYTHON: Final = ENVIRONMENTS / "trl" / "bin" / "python"
AIM: Final = 1.3
WARM: Final = 10
BATCHES: Final = 100
RESPONSES: Final = 128
GROUP: Final = 8
PROMPT: Final = 16
TOKENS: Final = 32
THREADS: Final = (1, 2)
"""Threads of TRL; each process of ours has one."""
LIMIT_S: Final = 600.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run behind its warm-up. cpu_seconds: by process."""

    tokens: int
    seconds: float
    cpu_seconds: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds

    def per_cpu_second(self, name: str = "") -> float | None:
        """Return tokens per CPU second of a process, or of all together.

        None where there is no such process.
        """
        spent = sum(self.cpu_seconds.values()) if not name else self.cpu_seconds.get(name)
        return self.tokens / spent if spent else None


def table(options: Options) -> Table:
    """Return medians, and ours beside the better of TRL's settings in the same round."""
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is not there: make bench-peers makes it")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        task = Path(name)
        shell([sys.executable, "-m", "benchmarks.peers.language_task", name])
        rounds = [_round(task, seed) for seed in range(1, options.repeat + 1)]
    return summarise(rounds)


def _round(task: Path, seed: int) -> dict[str, Outcome]:
    theirs = {_name(threads): _trl(task, threads, seed) for threads in THREADS}
    return {"Penstock": _penstock(task, seed), **theirs}


def _name(threads: int) -> str:
    return f"TRL GRPO, {threads} thread{'s' if threads > 1 else ''}"


def summarise(rounds: Sequence[Mapping[str, Outcome]]) -> Table:
    """Return a row each; the ratio is ours / the best of the others within a round, its median shown."""
    ours = next(iter(rounds[0]))
    ratio = statistics.median(
        one[ours].rate / max(other.rate for name, other in one.items() if name != ours) for one in rounds
    )
    rows: list[tuple[Cell, ...]] = []
    for name in rounds[0]:
        runs = [one[name] for one in rounds]
        rows.append((
            name,
            statistics.median(run.rate for run in runs),
            ratio if name == ours else None,
            *(_median(run.per_cpu_second(process) for run in runs) for process in ("", *PROCESSES)),
        ))  # fmt: skip
    return Table(
        title=(
            f"GRPO of a GPT-2 with 0.13 million parameters: {RESPONSES} responses of {TOKENS} tokens in a "
            "batch"
        ),
        columns=(
            "who",
            "tokens/s",
            "÷ best of TRL",
            "tokens per CPU second",
            *(f"{process} alone" for process in PROCESSES),
        ),
        rows=rows,
        note=f"{BATCHES} batches behind {WARM}; aim: {AIM} × the better of TRL's",
    )


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# ---- contenders


def _trl(task: Path, threads: int, seed: int) -> Outcome:
    command = [str(PYTHON), str(HERE / "grpo.py"), str(task), "--warm", str(WARM), "--batches", str(BATCHES)]
    told: dict[str, Any] = json.loads(
        shell([*command, "--threads", str(threads), "--seed", str(seed)]).splitlines()[-1]
    )
    return Outcome(
        tokens=told["tokens"], seconds=told["seconds"], cpu_seconds={"trainer": told["cpu_seconds"]}
    )


def _penstock(task: Path, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, _going(task, Path(name), seed) as run:
        before, spent = _at(run, WARM), _spent(run)
        after, until = _at(run, WARM + BATCHES), _spent(run)
    return Outcome(
        tokens=after["env_steps"] - before["env_steps"],
        seconds=after["time"] - before["time"],
        cpu_seconds={name: until[name] - spent[name] for name in PROCESSES},
    )


def _spent(run: EndlessRun) -> dict[str, float]:
    return {name: run.spent(name) for name in PROCESSES}


def _at(run: EndlessRun, updates: int) -> dict[str, Any]:
    """Return the newest line of metrics once there were so many updates; four lines come in a second."""
    while (newest := run.newest()).get("updates", 0) < updates:
        if run.age_s > LIMIT_S:
            raise RuntimeError(f"penstock train: not at update {updates} within {LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
    return newest


@contextmanager
def _going(task: Path, folder: Path, seed: int) -> Iterator[EndlessRun]:
    """Start a run without an end; its error output is raised when it does end."""
    recipe, errors = folder / "recipe.toml", folder / "errors"
    recipe.write_text(_RECIPE.format(model=task / "model", prompts=task / "prompts.jsonl"))
    command = (
        PENSTOCK,
        "train",
        str(recipe),
        "--run-dir",
        str(folder / "run"),
        "--seed",
        str(seed),
        "--json",
    )
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": str(HERE)},  # of the function that rewards
        ) as process,
    ):
        try:
            yield EndlessRun(folder / "run")
        finally:
            process.send_signal(signal.SIGTERM)


_RECIPE: Final = f"""
workload = "rlhf"
run = "bench"

[environment]
id = "liked-words"
count = {RESPONSES}

[environment.kwargs]
model = "{{model}}"
prompts = "{{prompts}}"
reward = "liked:liked"
group = {GROUP}
response_tokens = {TOKENS}

[policy.kwargs]
lora = false

[actor]
count = 1
unroll_length = {PROMPT + TOKENS - 1}

[algorithm]
name = "token_ppo"
advantage = "group"
batch_steps = {RESPONSES * (PROMPT + TOKENS - 1)}
epochs = 1
minibatches = 1
kl_coefficient = 0.0
learning_rate = 1e-6

[learner]
total_steps = 1_000_000_000
"""
