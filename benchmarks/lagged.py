"""Learning from experience that lags exactly n updates behind the learner, in one process.

No broker: the actor's environment, policy and fragments, the learner's batches and algorithm. Weights wait
in a queue of n + 1 snapshots and the oldest acts, so the first n updates learn from the initial weights.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actor.specification import run as actor_run
from benchmarks.experience import Experience
from learner.batch import Batch, assemble
from learner.model.model import make_model
from penstock.config.settings import Settings
from penstock.policy.weights import encode
from penstock.wire.fragment import Fragment
from penstock.wire.messages import Episode

WINDOW = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The result of a training.

    curve: (environment steps, mean return of the last WINDOW training episodes) after each update.
    The mean is NaN before the first episode ends. metrics: of each update.
    """

    curve: list[tuple[int, float]]
    metrics: list[dict[str, float]]


def learn(settings: Settings, staleness: int) -> Learned:
    """Learn for `learner.total_steps` environment steps.

    Raises RuntimeError when an update was not applied.
    """
    model, total_steps = make_model(settings), settings.learner.total_steps
    assert total_steps is not None, "say learner.total_steps"
    algorithm = model.algorithm
    experience = Experience(actor_run.read(model.specification, settings.actor), settings.seed, "staleness")
    waiting = deque([(encode(algorithm.published_modules()["default"]), 0)], maxlen=staleness + 1)
    steps, learned = 0, Learned(curve=[(0, math.nan)], metrics=[])
    while steps < total_steps:
        fragments: list[Fragment] = []
        while not algorithm.makes_batch(len(fragments), sum(one.header.charge for one in fragments)):
            fragments.append(experience.fragment(*waiting[0]))
        batch = assemble([(fragment.header, fragment.arrays()) for fragment in fragments], model.device)
        _check_lag(batch, algorithm.updates, staleness)
        update = algorithm.update(batch, progress=steps / total_steps)
        if not update.applied:
            raise RuntimeError(f"staleness {staleness}, seed {settings.seed}: an update was {update.reason}")
        waiting.append((encode(algorithm.published_modules()["default"]), algorithm.updates))
        steps += update.steps
        learned.metrics.append(update.metrics)
        learned.curve.append((steps, _mean_return(experience.episodes)))
    return learned


def _check_lag(batch: Batch, updates: int, staleness: int) -> None:
    lags = set((updates - batch.update).tolist())
    if lags != {min(staleness, updates)}:
        raise RuntimeError(f"update {updates}: experience lags {sorted(lags)} behind, not {staleness}")


def _mean_return(episodes: Sequence[Episode]) -> float:
    last = episodes[-WINDOW:]
    return statistics.fmean(episode.episode_return for episode in last) if last else math.nan
