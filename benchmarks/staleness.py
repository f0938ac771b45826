"""Both objectives of PPO on experience that lags exactly n updates behind the learner.

After Hilton, Cobbe and Schulman 2021 (`ppo-ewma`). One process, no broker: the actor's environment, policy
and fragments, the learner's batches and PPO. Weights wait in a queue of n + 1 snapshots and the oldest acts,
so the first n updates learn from the initial weights. One line of `docs/staleness.jsonl` per run: stop at any
time and start again. At the end the picture; `make staleness` also writes the section of `docs/algorithms.md`.
"""

import argparse
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from actor import run as actor_run
from actor.fragment_builder import FragmentBuilder, Stamp
from actor.seeds import action_seed, environment_seeds
from benchmarks.results import commit, machine, thin
from learner.batch import Batch, assemble
from learner.model import make_model, use_threads
from penstock.policy.weights import encode, load_into
from penstock.runtime.settings import Settings, load
from penstock.wire.fragment import Fragment
from penstock.wire.messages import Episode, Publication
from workloads.control.defaults import for_environment

DOCS = Path(__file__).resolve().parents[1] / "docs"
ENVIRONMENT = "CartPole-v1"
OBJECTIVES, STALENESS, SEEDS = ("decoupled", "coupled"), (0, 8, 32), (1, 2, 3)
TOTAL_STEPS = 300_000
WINDOW = 100
LEARNED, COLLAPSED = 200, 50
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagged:
    """One run. curve: (environment steps, mean return of the last WINDOW training episodes).

    mean_return: the curve's average over the second half of the steps. divergence (KL(μ‖π_θ), nats) and
    sample_share (effective sample size of π_θ/μ, 0..1): medians over updates.
    """

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
        """What makes two runs the same entry."""
        return self.objective, self.staleness, self.seed

    @property
    def early_return(self) -> float:
        """The curve's average over the first quarter of the steps."""
        return statistics.fmean(y for x, y in self.curve if x <= self.total_steps / 4)

    @property
    def collapsed(self) -> bool:
        """Below COLLAPSED after it had been above LEARNED."""
        returns = [y for _, y in self.curve]
        learned = next((i for i, y in enumerate(returns) if y > LEARNED), len(returns))
        return any(y < COLLAPSED for y in returns[learned:])


class Experience:
    """An actor of the project without its network: weights in, fragments and ended episodes out."""

    def __init__(self, run: actor_run.Run, seed: int) -> None:
        count = run.environment.count
        self.episodes: list[Episode] = []
        self._specification = run.specification
        self._stepper = run.make_environment(run.environment, count, seed)
        self._policy = run.make_policy(seed).policy
        self._policy.seed_actions(action_seed(seed, "staleness", 0))
        self._builder = FragmentBuilder(run.specification.schema, run.specification.unroll_length, count)
        first = self._stepper.reset(environment_seeds(seed, "staleness", 0, count))
        self._builder.start(first | self._policy.initial_state(count))
        self._sequence = 0

    def fragment(self, weights: bytes, update: int) -> Fragment:
        """The next unroll, acted with `weights`, those of update number `update`."""
        load_into(self._policy, weights)
        for _ in range(self._builder.unroll_length):
            acted = self._policy.act(self._builder.observation())
            stepped = self._stepper.step(self._policy.environment_action(acted.action))
            self._builder.record(acted.action, acted.log_prob, stepped, acted.state)
        self._sequence += 1
        publication = Publication(version=update + 1, update=update)
        run = self._specification.run
        stamp = Stamp(run=run, session=1, sequence=self._sequence, weights=publication, round=0)
        fragment, episodes = self._builder.cut(stamp)
        self.episodes += episodes
        return fragment


def train(objective: str, staleness: int, seed: int, total_steps: int) -> Lagged:
    """One run of `total_steps` environment steps; raises RuntimeError when an update was not applied."""
    began, settings = time.monotonic(), _settings(objective, seed, total_steps)
    model = make_model(settings)
    algorithm, experience = (
        model.algorithm,
        Experience(actor_run.read(model.specification, settings.actor), seed),
    )
    waiting = deque([(encode(algorithm.published_modules()["default"]), 0)], maxlen=staleness + 1)
    steps, curve, measured = 0, [(0, math.nan)], []
    while steps < total_steps:
        fragments: list[Fragment] = []
        while not algorithm.take([fragment.header for fragment in fragments]):
            fragments.append(experience.fragment(*waiting[0]))
        batch = assemble([(fragment.header, fragment.arrays()) for fragment in fragments], model.device)
        _check_lag(batch, algorithm.updates, staleness)
        update = algorithm.update(batch, progress=steps / total_steps)
        if not update.applied:
            raise RuntimeError(
                f"{objective}, staleness {staleness}, seed {seed}: an update was {update.reason}"
            )
        waiting.append((encode(algorithm.published_modules()["default"]), algorithm.updates))
        steps += update.steps
        measured.append(update.metrics)
        curve.append((steps, _mean_return(experience.episodes)))
    return Lagged(
        objective=objective,
        staleness=staleness,
        seed=seed,
        total_steps=total_steps,
        updates=algorithm.updates,
        mean_return=round(statistics.fmean(y for x, y in curve if x >= total_steps / 2), 1),
        final_return=round(curve[-1][1], 1),
        divergence=round(statistics.median(m["kl_behaviour"] for m in measured), 5),
        sample_share=round(statistics.median(m["effective_sample_size"] for m in measured), 3),
        seconds=round(time.monotonic() - began, 1),
        commit=commit(),
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        curve=thin([(x, round(y, 1)) for x, y in curve if not math.isnan(y)]),
    )


def _settings(objective: str, seed: int, total_steps: int) -> Settings:
    over = {
        "run": "staleness",
        "seed": seed,
        "environment": {"id": ENVIRONMENT, "vectorise": "vector"},
        "algorithm": {"objective": objective},
        "learner": {"device": "cpu", "total_steps": total_steps},
    }
    return load([for_environment(ENVIRONMENT), over])


def _check_lag(batch: Batch, updates: int, staleness: int) -> None:
    lags = set((updates - batch.update).tolist())
    if lags != {min(staleness, updates)}:
        raise RuntimeError(f"update {updates}: experience lags {sorted(lags)} behind, not {staleness}")


def _mean_return(episodes: Sequence[Episode]) -> float:
    last = episodes[-WINDOW:]
    return statistics.fmean(episode.episode_return for episode in last) if last else math.nan


def read(path: Path) -> dict[Key, Lagged]:
    """The newest run of every entry; an absent file holds none."""
    if not path.exists():
        return {}
    runs = (Lagged(**json.loads(line)) for line in path.read_text().splitlines() if line)
    return {run.key: run for run in runs}


def draw(runs: Sequence[Lagged], path: Path) -> None:
    """One panel per staleness: each seed a thin line, the mean of an objective's seeds a thick one."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, len(STALENESS), sharey=True)
    for axis, staleness in zip(axes, STALENESS, strict=True):
        for colour, objective in zip(("C0", "C1"), OBJECTIVES, strict=True):
            curves = [run.curve for run in runs if (run.objective, run.staleness) == (objective, staleness)]
            grid = np.linspace(0, max((curve[-1][0] for curve in curves), default=0), 200)
            lines = [np.interp(grid, *np.array(curve).T) for curve in curves]
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colour, linewidth=0.8, alpha=0.5)
            if lines:
                axis.plot(grid, np.mean(lines, axis=0), color=colour, linewidth=2.5)
        axis.set(title=f"{staleness} updates behind", xlabel="environment steps", ylim=(0, 510))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"mean return, last {WINDOW} episodes")
    axes[0].legend(
        [Line2D([], [], color=c, linewidth=2.5) for c in ("C0", "C1")], OBJECTIVES, loc="lower right"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing, then draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness", description="Run what is missing."
    )
    parser.add_argument("--results", type=Path, default=DOCS / "staleness.jsonl", help="file of the runs")
    parser.add_argument("--picture", type=Path, default=DOCS / "images" / "staleness.png")
    parser.add_argument("--total-steps", type=int, default=TOTAL_STEPS, help="environment steps of a run")
    options = parser.parse_args()
    use_threads(Settings())
    done = read(options.results)
    todo = [key for key in product(OBJECTIVES, STALENESS, SEEDS) if key not in done]
    for number, (objective, staleness, seed) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {objective}, staleness {staleness}, seed {seed} …", flush=True)
        run = train(objective, staleness, seed, options.total_steps)
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        print(
            f"    mean return {run.mean_return}, at the end {run.final_return}, {run.seconds} s", flush=True
        )
    draw(list(read(options.results).values()), options.picture)


if __name__ == "__main__":
    main()
