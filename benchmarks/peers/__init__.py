"""Tasks learnt by Penstock and by two peers, alternately on this machine: `make bench-peers`.

Each peer is one small script beside this file, run by an environment of its own below `.venv-peers`, since
their requirements exclude each other; a peer without one is left out. Every contender trains to the end of
its budget, with another seed in each round. From the same run come the steps per second of training, when
the mean return of the last 100 training episodes first reached the task's target (in seconds of training,
from the first experience on, and in seconds since the command was given) and the CPU seconds of all its
processes, start and end included. Where some rounds do not get there, those
seconds are medians of the others.
"""

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.table import Cell, Options, Table

WINDOW: Final = 100
LIMIT_S: Final = 1800.0
HERE: Final = Path(__file__).parent
ENVIRONMENTS: Final = HERE.parents[1] / ".venv-peers"
PENSTOCK: Final = str(Path(sys.executable).with_name("penstock"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run.

    solved_s: of training; from_shell_s: of the clock; both None when it was not solved.
    """

    steps_per_second: float
    cpu_per_million: float
    solved_s: float | None
    from_shell_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A learner in the comparison: its budget, and the function that runs it once with a seed."""

    name: str
    budget: str
    run: Callable[[int], Outcome]
    is_ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task by its name in Gymnasium. vectorisers: with which Penstock runs it.

    steps, ours: its budget. wide, zoo, appo: the peers' budgets, which stand in their scripts.
    """

    name: str
    target: float
    steps: int
    ours: str
    vectorisers: Sequence[str]
    wide: str
    zoo: str
    appo: str


CARTPOLE: Final = Task(
    name="CartPole-v1",
    target=475.0,
    steps=150_000,
    ours="1 actor × 16, 6 epochs",
    vectorisers=("sync", "vector"),
    wide="163,840 steps, 32 × 64, 4 epochs",
    zoo="100,000 steps, 8 × 32, 20 epochs",
    appo="150,000 steps, 2 workers × 16, 6 epochs",
)
ACROBOT: Final = Task(
    name="Acrobot-v1",
    target=-100.0,
    steps=300_000,
    ours="2 actors × 8, 4 epochs",
    vectorisers=("sync", "envpool"),
    wide="300,000 steps, 32 × 64, 4 epochs",
    zoo="300,000 steps, 16 × 256, 4 epochs",
    appo="300,000 steps, 2 workers × 16, 4 epochs",
)
LUNAR_LANDER: Final = Task(
    name="LunarLander-v3",
    target=200.0,
    steps=1_000_000,
    ours="2 actors × 16, 6 epochs",
    vectorisers=("sync", "envpool"),
    wide="1,000,000 steps, 32 × 64, 4 epochs",
    zoo="1,000,000 steps, 16 × 1,024, 4 epochs",
    appo="1,000,000 steps, 2 workers × 16, 4 epochs",
)


def table_of(task: Task) -> Callable[[Options], Table]:
    """Return what measures medians of every contender, and ours beside the best of the peers."""
    return partial(_table, task)


def _table(task: Task, options: Options) -> Table:
    contenders, absent = [*_ours(task)], []
    for contender, python in _peers(task):
        if python.exists():
            contenders.append(contender)
        else:
            absent.append(contender.name)
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in contenders}
    for seed in range(1, options.repeat + 1):
        for contender in contenders:
            outcomes[contender.name].append(contender.run(seed))
    return summarise(task, contenders, outcomes, absent)


def summarise(
    task: Task,
    contenders: Sequence[Contender],
    outcomes: dict[str, list[Outcome]],
    absent: Sequence[str] = (),
) -> Table:
    """Return one row each; the ratios are ours / best peer, of medians. absent: names of peers left out."""
    medians = {name: _medians(runs) for name, runs in outcomes.items()}
    theirs = [medians[contender.name] for contender in contenders if not contender.is_ours]
    best = (
        [
            choose(_known(column), default=None)
            for choose, column in zip((max, min, min, min), zip(*theirs, strict=True), strict=True)
        ]
        if theirs
        else [None] * 4
    )
    rows = []
    for contender in contenders:
        runs, own = outcomes[contender.name], medians[contender.name]
        ratios = [_ratio(a, b) if contender.is_ours else None for a, b in zip(own, best, strict=True)]
        solved = f"{sum(run.solved_s is not None for run in runs)} of {len(runs)}"
        cells = (cell for pair in zip(own, ratios, strict=True) for cell in pair)
        rows.append((contender.name, contender.budget, solved, *cells))
    measured = (
        "steps/s while learning",
        f"training seconds to {task.target:g}",
        f"seconds from the shell to {task.target:g}",
        "CPU s per 10⁶ steps",
    )
    return Table(
        title=f"{task.name} beside peers",
        columns=("who", "budget", "solved", *(name for each in measured for name in (each, "÷ best peer"))),
        rows=rows,
        note=f"{task.target:g}: mean return of the last {WINDOW} training episodes, actions sampled"
        + (f"; left out, no environment: {', '.join(absent)}" if absent else ""),
    )


def _medians(runs: Sequence[Outcome]) -> tuple[float | None, ...]:
    return (
        _median(run.steps_per_second for run in runs),
        _median(run.solved_s for run in runs),
        _median(run.from_shell_s for run in runs),
        _median(run.cpu_per_million for run in runs),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ratio(own: float | None, other: float | None) -> Cell:
    return None if own is None or not other else own / other


# ---- contenders


def _ours(task: Task) -> list[Contender]:
    return [
        Contender(
            name=f"Penstock, {vectorise}",
            budget=f"{task.steps:,} steps, {task.ours}",
            run=partial(_penstock, task, vectorise),
            is_ours=True,
        )
        for vectorise in task.vectorisers
    ]


def _peers(task: Task) -> list[tuple[Contender, Path]]:
    """Return each peer with the interpreter that it needs."""
    sb3, appo = (ENVIRONMENTS / name / "bin" / "python" for name in ("stable-baselines3", "sample-factory"))
    told = (task.name, "--target", task.target)
    return [
        (
            Contender(
                name="Stable-Baselines3 PPO, wide",
                budget=task.wide,
                run=partial(_peer, sb3, "sb3.py", "wide", *told),
            ),
            sb3,
        ),
        (
            Contender(
                name="Stable-Baselines3 PPO, zoo",
                budget=task.zoo,
                run=partial(_peer, sb3, "sb3.py", "zoo", *told),
            ),
            sb3,
        ),
        (
            Contender(
                name="Sample Factory APPO",
                budget=task.appo,
                run=partial(_peer, appo, "appo.py", *told),
            ),
            appo,
        ),
    ]


def _peer(python: Path, script: str, *arguments: str | float) -> Outcome:
    """Run a peer's script once; the last argument is the seed."""
    *said, seed = map(str, arguments)
    began_s, before_s = time.time(), _spent_s()
    told = json.loads(shell([str(python), str(HERE / script), *said, "--seed", seed]).splitlines()[-1])
    return Outcome(
        steps_per_second=told["steps"] / told["seconds"],
        cpu_per_million=(_spent_s() - before_s) / told["steps"] * 1e6,
        solved_s=told["solved_s"],
        from_shell_s=None if told["solved_at"] is None else told["solved_at"] - began_s,
    )


def _penstock(task: Task, vectorise: str, seed: int) -> Outcome:
    """Run `penstock train` with its defaults; it goes on to its budget, as the peers do."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        run = Path(folder) / "run"
        settings = ("--set", f"environment.vectorise={vectorise}", "--set", "learner.stop_at_target=false")
        began_s, before_s = time.time(), _spent_s()
        command = [PENSTOCK, "train", task.name, "--seed", str(seed), "--run-dir", str(run), *settings]
        summary = json.loads(shell([*command, "--total-steps", str(task.steps), "--json"]))
        lines = (run / "metrics.jsonl").read_text().splitlines()
    solved = first_solved(map(json.loads, lines), task.target)
    return Outcome(
        steps_per_second=summary["env_steps_per_second"],
        cpu_per_million=(_spent_s() - before_s) / summary["env_steps"] * 1e6,
        solved_s=None if solved is None else solved["training_seconds"],
        from_shell_s=None if solved is None else solved["time"] - began_s,
    )


def _spent_s() -> float:
    """CPU seconds of the processes below this one that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_solved(lines: Iterable[dict[str, Any]], target: float) -> dict[str, Any] | None:
    """Return the first line of `metrics.jsonl` whose last WINDOW episodes reached `target`.

    Lines are a quarter of a second apart.
    """
    return next(
        (line for line in lines if line["episodes"] >= WINDOW and line["mean_return"] >= target), None
    )


def shell(command: Sequence[str]) -> str:
    """Return the output of a command.

    Raises RuntimeError when it fails or takes longer than LIMIT_S; all its processes end with this one.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[1]}: not done within {LIMIT_S:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no error output"])[-1]
            raise RuntimeError(f"{command[1]}: exit {process.returncode}: {last}")
    return output
