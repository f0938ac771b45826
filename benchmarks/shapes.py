"""Steps until a task is learned, by how many environments an actor steps, and for how many steps at a time.

`python -m benchmarks.shapes CartPole-v1 --shapes 16x64 32x32 --seeds 1 2 3` learns with the settings of the
task but for `environment.count` and `actor.unroll_length`, in one process, from experience that is one update
old. A policy that is good and one that is known to be good are two things: an evaluation that is played every
second update says the first, the training episodes, after which a run asks for its evaluation, the second.
"""

import argparse
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from rich.console import Console

from actor.evaluation.play import play
from actor.specification import run as actor_run
from actor.specification.run import Run
from benchmarks.experience import Experience
from benchmarks.table import Cell, Table
from learner.batch import assemble
from learner.evaluation.evaluation import RECENT_EPISODES
from learner.model.device import use_threads
from learner.model.model import make_model
from penstock.config.settings import Settings, load
from penstock.policy.weights import encode
from penstock.wire.fragment import Fragment
from workloads.control import environment
from workloads.control.defaults import for_environment

LOOK_EVERY = 2
"""Updates between two evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Environment steps until a target was reached; None: not within the limit.

    evaluated: by the deterministic evaluation. shown: by the mean of the last training episodes. acting_us:
    CPU time of acting, stepping and cutting a step, in microseconds.
    """

    evaluated: int | None
    shown: int | None
    acting_us: float


class Actors:
    """Those of a run, each in its turn; they act with the weights of one update ago."""

    def __init__(self, run: Run, seed: int) -> None:
        names = [f"actor-{index}" for index in range(run.actor.count)]
        self._actors = [Experience(run, seed, name) for name in names]
        self._turns = cycle(self._actors)
        self.cpu_s = 0.0

    def fragment(self, weights: bytes, update: int) -> Fragment:
        """Return a fragment of the actor whose turn it is."""
        began = time.thread_time()
        fragment = next(self._turns).fragment(weights, update)
        self.cpu_s += time.thread_time() - began
        return fragment

    def recent(self) -> Sequence[float]:
        """Return the returns of the last training episodes, as many of each actor."""
        share = max(1, RECENT_EPISODES // len(self._actors))
        return [episode.episode_return for actor in self._actors for episode in actor.episodes[-share:]]


def measure(settings: Settings, target: float, limit: int) -> Reached:
    """Learn until both say that `target` is reached, or `limit` environment steps are made."""
    use_threads(settings)
    model, total_steps = make_model(settings), settings.learner.total_steps
    assert total_steps is not None, "say learner.total_steps"
    run = actor_run.read(model.specification, settings.actor)
    algorithm, actors, evaluate = model.algorithm, Actors(run, settings.seed), _evaluator(run)
    waiting = deque([(encode(algorithm.published_modules()["default"]), 0)], maxlen=2)
    steps, evaluated, shown = 0, None, None
    while steps < limit and (evaluated is None or shown is None):
        fragments: list[Fragment] = []
        while not algorithm.makes_batch(len(fragments), sum(one.header.charge for one in fragments)):
            fragments.append(actors.fragment(*waiting[0]))
        batch = assemble([(fragment.header, fragment.arrays()) for fragment in fragments], model.device)
        steps += algorithm.update(batch, progress=steps / total_steps).steps
        waiting.append((encode(algorithm.published_modules()["default"]), algorithm.updates))
        recent = actors.recent()
        if shown is None and len(recent) >= RECENT_EPISODES and statistics.fmean(recent) >= target:
            shown = steps
        if evaluated is None and algorithm.updates % LOOK_EVERY == 0 and evaluate(waiting[-1][0]) >= target:
            evaluated = steps
    return Reached(evaluated=evaluated, shown=shown, acting_us=actors.cpu_s / steps * 1e6)


def _evaluator(run: Run) -> Callable[[bytes], float]:
    """Return what plays the evaluation of a run with given weights, and tells the mean return."""
    section, policy = run.evaluation, run.make_policy(0).policy
    stepper, stop = run.make_environment(run.environment, section.episodes, section.seed), threading.Event()

    def mean(weights: bytes) -> float:
        policy.load(weights)
        played = play(
            stepper, policy, episodes=section.episodes, seed=section.seed, deterministic=True, stop=stop
        )
        assert played is not None, "nothing stops it"
        return statistics.fmean(episode.episode_return for episode in played)

    return mean


def settings_of(task: str, environments: int, steps: int, seed: int) -> Settings:
    """Return the settings of a task, learned by PPO, with another shape."""
    over = {
        "run": "shapes",
        "seed": seed,
        "environment": {"id": task, "count": environments},
        "actor": {"unroll_length": steps},
        "learner": {"device": "cpu"},
    }
    return load([for_environment(task, "ppo"), over])


def table(task: str, shapes: Sequence[str], seeds: Sequence[int], target: float, limit: int) -> Table:
    """Return the means of every shape, and the differences to the first one, seed by seed."""
    reached: dict[str, list[Reached]] = {shape: [] for shape in shapes}
    for seed in seeds:  # in turns, so that a slow hour is one for all
        for shape in shapes:
            environments, steps = map(int, shape.split("x"))
            reached[shape].append(measure(settings_of(task, environments, steps, seed), target, limit))
    first = reached[shapes[0]]
    return Table(
        title=f"{task} until {target:g}, {len(seeds)} seeds, at most {limit:,} steps",
        columns=(
            "shape",
            "evaluation",
            "of the first",
            "training episodes",
            "of the first",
            "CPU µs a step",
        ),
        rows=[_row(shape, found, first) for shape, found in reached.items()],
        note=(
            f"environments x steps; mean steps until the evaluation, and the last {RECENT_EPISODES} training "
            "episodes, reach it, –: not with every seed; differences of the same seeds ± standard error"
        ),
    )


def _row(shape: str, found: Sequence[Reached], first: Sequence[Reached]) -> list[Cell]:
    evaluated, shown = [one.evaluated for one in found], [one.shown for one in found]
    return [
        shape,
        _mean(evaluated),
        _difference(evaluated, [one.evaluated for one in first]),
        _mean(shown),
        _difference(shown, [one.shown for one in first]),
        statistics.median(one.acting_us for one in found),
    ]


def _mean(steps: Sequence[int | None]) -> float | None:
    known = [one for one in steps if one is not None]
    return statistics.fmean(known) if len(known) == len(steps) else None


def _difference(steps: Sequence[int | None], first: Sequence[int | None]) -> str | None:
    pairs = zip(steps, first, strict=True)
    known = [one - other for one, other in pairs if one is not None and other is not None]
    if steps == first or len(known) < max(2, len(steps)):
        return None
    return f"{statistics.fmean(known):+,.0f} ± {statistics.stdev(known) / len(known) ** 0.5:,.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--shapes", nargs="+", required=True, metavar="ENVIRONMENTSxSTEPS")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--target", type=float, help="default: the task's own")
    parser.add_argument("--limit", type=int, default=200_000)
    given = parser.parse_args()
    known = settings_of(given.task, 1, 1, 0)
    targets = (given.target, known.learner.target_return, environment.target(known.environment))
    target = next((one for one in targets if one is not None), None)
    if target is None:
        parser.error(f"{given.task} has no target of its own; say --target")
    table(given.task, given.shapes, given.seeds, target, given.limit).show(Console())


if __name__ == "__main__":
    main()
