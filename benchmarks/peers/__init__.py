"""CartPole-v1 learnt by Penstock and by two peers, alternately on this machine: `make bench-peers`.

Each peer is one small script beside this file, run by an environment of its own below `.venv-peers`, since
their requirements exclude each other; a peer without one is left out. Every contender trains to the end of
its budget, with another seed in each round. From the same run come the steps per second of training, and when
the mean return of the last 100 training episodes first was 475: in seconds of training, from the first
experience on, and in seconds since the command was given. Where some rounds do not get there, those seconds
are medians of the others.
"""

import json
import os
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

TARGET: Final = 475.0
WINDOW: Final = 100
LIMIT_S: Final = 600.0
HERE: Final = Path(__file__).parent
ENVIRONMENTS: Final = HERE.parents[1] / ".venv-peers"
PENSTOCK: Final = str(Path(sys.executable).with_name("penstock"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run.

    solved_s: of training; from_shell_s: of the clock; both None when it was not solved.
    """

    steps_per_second: float
    solved_s: float | None
    from_shell_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A learner in the comparison: its budget, and the function that runs it once with a seed."""

    name: str
    budget: str
    run: Callable[[int], Outcome]
    is_ours: bool = False


def table(options: Options) -> Table:
    """Return medians of every contender, and ours beside the best of the peers."""
    contenders, absent = [*_ours()], []
    for contender, python in _peers():
        if python.exists():
            contenders.append(contender)
        else:
            absent.append(contender.name)
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in contenders}
    for seed in range(1, options.repeat + 1):
        for contender in contenders:
            outcomes[contender.name].append(contender.run(seed))
    return summarise(contenders, outcomes, absent)


def summarise(
    contenders: Sequence[Contender], outcomes: dict[str, list[Outcome]], absent: Sequence[str] = ()
) -> Table:
    """Return one row each; the ratios are ours / best peer, of medians. absent: names of peers left out."""
    medians = {name: _medians(runs) for name, runs in outcomes.items()}
    theirs = [medians[contender.name] for contender in contenders if not contender.is_ours]
    best = (
        max(_known(median[0] for median in theirs), default=None),
        min(_known(median[1] for median in theirs), default=None),
        min(_known(median[2] for median in theirs), default=None),
    )
    rows = []
    for contender in contenders:
        runs, own = outcomes[contender.name], medians[contender.name]
        ratios = [_ratio(a, b) if contender.is_ours else None for a, b in zip(own, best, strict=True)]
        solved = f"{sum(run.solved_s is not None for run in runs)} of {len(runs)}"
        cells = (cell for pair in zip(own, ratios, strict=True) for cell in pair)
        rows.append((contender.name, contender.budget, solved, *cells))
    return Table(
        title="CartPole-v1 beside peers",
        columns=(
            "who",
            "budget",
            "solved",
            "steps/s while learning",
            "÷ best peer",
            f"training seconds to {TARGET:g}",
            "÷ best peer",
            f"seconds from the shell to {TARGET:g}",
            "÷ best peer",
        ),
        rows=rows,
        note=f"{TARGET:g}: mean return of the last {WINDOW} training episodes, actions sampled"
        + (f"; left out, no environment: {', '.join(absent)}" if absent else ""),
    )


def _medians(runs: Sequence[Outcome]) -> tuple[float | None, float | None, float | None]:
    return (
        _median(run.steps_per_second for run in runs),
        _median(run.solved_s for run in runs),
        _median(run.from_shell_s for run in runs),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ratio(own: float | None, other: float | None) -> Cell:
    return None if own is None or not other else own / other


# ---- contenders


def _ours() -> list[Contender]:
    return [
        Contender(
            name=f"Penstock, {vectorise}",
            budget="150,000 steps, 1 actor × 16, 6 epochs",
            run=partial(_penstock, vectorise),
            is_ours=True,
        )
        for vectorise in ("sync", "vector")
    ]


def _peers() -> list[tuple[Contender, Path]]:
    """Return each peer with the interpreter that it needs."""
    sb3, appo = (ENVIRONMENTS / name / "bin" / "python" for name in ("stable-baselines3", "sample-factory"))
    return [
        (
            Contender(
                name="Stable-Baselines3 PPO, wide",
                budget="163,840 steps, 32 × 64, 4 epochs",
                run=partial(_peer, sb3, "sb3.py", "wide"),
            ),
            sb3,
        ),
        (
            Contender(
                name="Stable-Baselines3 PPO, zoo",
                budget="100,000 steps, 8 × 32, 20 epochs",
                run=partial(_peer, sb3, "sb3.py", "zoo"),
            ),
            sb3,
        ),
        (
            Contender(
                name="Sample Factory APPO",
                budget="150,000 steps, 2 workers × 16, 6 epochs",
                run=partial(_peer, appo, "appo.py"),
            ),
            appo,
        ),
    ]


def _peer(python: Path, script: str, *arguments: str | int) -> Outcome:
    """Run a peer's script once; the last argument is the seed."""
    *said, seed = map(str, arguments)
    began_s = time.time()
    told = json.loads(shell([str(python), str(HERE / script), *said, "--seed", seed]).splitlines()[-1])
    return Outcome(
        steps_per_second=told["steps"] / told["seconds"],
        solved_s=told["solved_s"],
        from_shell_s=None if told["solved_at"] is None else told["solved_at"] - began_s,
    )


def _penstock(vectorise: str, seed: int) -> Outcome:
    """Run `penstock train` with its defaults; it goes on to its budget, as the peers do."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        run = Path(folder) / "run"
        settings = ("--set", f"environment.vectorise={vectorise}", "--set", "learner.stop_at_target=false")
        began_s = time.time()
        command = [PENSTOCK, "train", "CartPole-v1", "--seed", str(seed), "--run-dir", str(run), *settings]
        summary = json.loads(shell([*command, "--json"]))
        lines = (run / "metrics.jsonl").read_text().splitlines()
    solved = first_solved(json.loads(line) for line in lines)
    return Outcome(
        steps_per_second=summary["env_steps_per_second"],
        solved_s=None if solved is None else solved["training_seconds"],
        from_shell_s=None if solved is None else solved["time"] - began_s,
    )


def first_solved(lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first line of `metrics.jsonl` whose last WINDOW episodes reached TARGET.

    Lines are a quarter of a second apart.
    """
    return next(
        (line for line in lines if line["episodes"] >= WINDOW and line["mean_return"] >= TARGET), None
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
