"""Tasks learnt by Penstock and by two peers, alternately on this machine: `make bench-peers`.

The peers' scripts are in `others.py`, run by an environment of its own each below `.venv-peers`, since their
requirements exclude each other; a peer without one is left out. Every contender trains to the end of its
budget, with another seed in each round. From the same run come the steps per second of training, when the
mean return of the last 100 training episodes first reached the task's target (in seconds of training, from
the first experience on, and in seconds since the command was given) and the CPU seconds of all its processes,
start and end included. Where some rounds do not get there, those seconds are medians of the others.
"""

import json
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.stand import Options, Table, known_median, listening, shell
from benchmarks.train import trained

WINDOW: Final = 100
HERE: Final = Path(__file__).parent
ENVIRONMENTS: Final = HERE.parents[1] / ".venv-peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run.

    solved_s: of training; from_shell_s: of the clock; both None when it was not solved.
    """

    steps_per_second: float
    cpu_per_million: float
    solved_s: float | None
    from_shell_s: float | None


class Contender(NamedTuple):
    """A learner in the comparison, and the function that runs it once with a seed."""

    name: str
    run: Callable[[int], Outcome]
    is_ours: bool = False


class Task(NamedTuple):
    """A task by its name in Gymnasium. steps: our budget; the peers' stand in `others.py`, by `case`."""

    name: str
    target: float
    steps: int
    vectorisers: Sequence[str]
    case: str = "ppo"
    settings: Sequence[str] = ()


CARTPOLE: Final = Task("CartPole-v1", 475.0, 150_000, ("sync", "vector"))
ACROBOT: Final = Task("Acrobot-v1", -100.0, 300_000, ("sync", "envpool"))
LUNAR_LANDER: Final = Task("LunarLander-v3", 200.0, 1_000_000, ("sync", "envpool"))
_REPLAY: Final = ("algorithm.replay_ratio=1", "algorithm.learning_starts=1000", "evaluation.episodes=0")
SAC: Final = Task("HalfCheetah-v5", 4000.0, 10_000, ("sync",), "sac", ("algorithm.batch_size=256", *_REPLAY))
DQN: Final = Task("LunarLander-v3", 200.0, 10_000, ("sync",), "dqn", _REPLAY)
PEERS: Final = {
    "Stable-Baselines3 PPO, wide": ("stable-baselines3", "sb3", "wide"),
    "Stable-Baselines3 PPO, zoo": ("stable-baselines3", "sb3", "zoo"),
    "Sample Factory APPO": ("sample-factory", "appo"),
    "Stable-Baselines3 SAC": ("stable-baselines3", "sb3", "sac"),
    "SBX SAC": ("sbx", "sb3", "sac", "--library", "sbx"),
    "Stable-Baselines3 DQN": ("stable-baselines3", "sb3", "dqn"),
    "SBX DQN": ("sbx", "sb3", "dqn", "--library", "sbx"),
}
"""Environment and words of the command line, by name."""


def _table(task: Task, options: Options) -> Table:
    """Return medians of every contender, and ours beside the best of the peers."""
    contenders = [
        Contender(f"Penstock, {way}", partial(_penstock, task, way), is_ours=True) for way in task.vectorisers
    ]
    peers = [name for name in PEERS if task.case in name.lower()]
    absent = [name for name in peers if not _python(PEERS[name][0]).exists()]
    contenders += [Contender(name, partial(_peer, name, task)) for name in peers if name not in absent]
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in contenders}
    for seed in range(1, options.repeat + 1):
        for contender in contenders:
            outcomes[contender.name].append(contender.run(seed))
    return summarise(task, contenders, outcomes, absent)


cartpole: Final = partial(_table, CARTPOLE)
acrobot: Final = partial(_table, ACROBOT)
lunar_lander: Final = partial(_table, LUNAR_LANDER)
sac, dqn = partial(_table, SAC), partial(_table, DQN)


def summarise(
    task: Task,
    contenders: Sequence[Contender],
    outcomes: Mapping[str, Sequence[Outcome]],
    absent: Sequence[str] = (),
) -> Table:
    """Return one row each; the ratios are ours / best peer, of medians. absent: names of peers left out."""
    names = ("steps_per_second", "solved_s", "from_shell_s", "cpu_per_million")
    medians = {
        who: [known_median(getattr(run, name) for run in runs) for name in names]
        for who, runs in outcomes.items()
    }
    theirs = [medians[contender.name] for contender in contenders if not contender.is_ours]
    best = [
        choose((one[at] for one in theirs if one[at] is not None), default=None)  # type: ignore[type-var]
        for at, choose in enumerate((max, min, min, min))
    ]
    rows = []
    for contender in contenders:
        runs, own = outcomes[contender.name], medians[contender.name]
        solved = f"{sum(run.solved_s is not None for run in runs)} of {len(runs)}"
        ratios = [a / b if contender.is_ours and a and b else None for a, b in zip(own, best, strict=True)]
        cells = (cell for pair in zip(own, ratios, strict=True) for cell in pair)
        rows.append((contender.name, solved, *cells))
    measured = (
        *("steps/s while learning", f"training seconds to {task.target:g}"),
        *(f"seconds from the shell to {task.target:g}", "CPU s per 10⁶ steps"),
    )
    return Table(
        title=f"{task.name} beside peers",
        columns=("who", "solved", *(name for each in measured for name in (each, "÷ best peer"))),
        rows=rows,
        note=f"{task.target:g}: mean return of the last {WINDOW} training episodes, actions sampled"
        + (f"; left out, no environment: {', '.join(absent)}" if absent else ""),
    )


# ---- contenders


def _penstock(task: Task, vectorise: str, seed: int) -> Outcome:
    """Run `penstock train` with its defaults; it goes on to its budget, as the peers do."""
    began_s, before_s = time.time(), _spent_s()
    settings = (f"environment.vectorise={vectorise}", f"algorithm.name={task.case}", *task.settings)
    options = ("--seed", str(seed), *(word for one in settings for word in ("--set", one)))
    run = trained(*options, task=task.name, steps=task.steps)
    solved = first_solved(run.metrics, task.target)
    return Outcome(
        steps_per_second=run.summary["env_steps_per_second"],
        cpu_per_million=(_spent_s() - before_s) / run.summary["env_steps"] * 1e6,
        solved_s=None if solved is None else solved["training_seconds"],
        from_shell_s=None if solved is None else solved["time"] - began_s,
    )


def first_solved(lines: Iterable[dict[str, Any]], target: float) -> dict[str, Any] | None:
    """Return the first line of `metrics.jsonl` whose last WINDOW episodes reached `target`."""
    solved = (line for line in lines if line["episodes"] >= WINDOW and line["mean_return"] >= target)
    return next(solved, None)


def _peer(name: str, task: Task, seed: int) -> Outcome:
    began_s, before_s = time.time(), _spent_s()
    result = other(*PEERS[name], task.name, target=task.target, seed=seed)
    return Outcome(
        steps_per_second=result["steps"] / result["seconds"],
        cpu_per_million=(_spent_s() - before_s) / result["steps"] * 1e6,
        solved_s=result["solved_s"],
        from_shell_s=None if result["solved_at"] is None else result["solved_at"] - began_s,
    )


def _spent_s() -> float:
    """CPU seconds of the processes below this one that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- environments of their own


def _python(environment: str) -> Path:
    return ENVIRONMENTS / environment / "bin" / "python"


def python_of(environment: str) -> str:
    """Return the interpreter of an environment; ends the program where there is none."""
    if not _python(environment).exists():
        raise SystemExit(f"{_python(environment)} is not there: make bench-peers makes it")
    return str(_python(environment))


def other(environment: str, *words: str, **numbers: float) -> dict[str, Any]:
    """Run `others.py` once and return its result."""
    options = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    output = shell([python_of(environment), str(HERE / "others.py"), *words, *options])
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def fastapi() -> AbstractContextManager[tuple[str, int]]:
    """Start FastAPI before a Stable-Baselines3 policy; yields its address and pid."""
    return listening(python_of("stable-baselines3"), str(HERE / "others.py"), "serve")
