"""The preparation of a run of language models in short, for a dry run.

The reward model gets a few steps of its training, the steps that are missing are extrapolated. Everything
else is made whole. What `prepare` does not load this does not load either: the launcher's memory is measured.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.config.preparation import Progress, Rehearsal, Scores
from penstock.config.settings import Settings
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback.examples import Scored
from penstock.workloads.language.feedback.reading import read
from penstock.workloads.rlhf.preparation import (
    REWARD_MODEL,
    made_first,
    order_of,
    release_device,
    with_places,
)

if TYPE_CHECKING:
    from penstock.workloads.language.reward.training import Order

STEPS: Final = 12
LEAST_STEPS: Final = 4
WITHIN_S: Final = 20.0
"""Seconds after which no further step is begun where there are LEAST_STEPS: large models are slow."""
WARMUP_STEPS: Final = 2
"""First steps, which allocate and compile."""


def rehearse(settings: Settings, folder: Path, progress: Progress) -> Rehearsal:
    """Rehearse as `Workload.rehearse` says; raises ConfigurationError, Interrupted."""
    made, section = made_first(settings, folder, progress)
    if section.reward:
        return Rehearsal(settings=with_places(settings, made))
    order = order_of(section, (folder / REWARD_MODEL).absolute(), settings.seed)
    progress.say(f"rehearsing: up to {STEPS} steps of the reward model's training on {section.feedback}")
    more_s = _train(order, progress)
    made["reward"] = str(order.out)
    scores = [example.score for example in read(order.source).examples if isinstance(example, Scored)]
    return Rehearsal(
        settings=with_places(settings, made), more_seconds=more_s, scores={"feedback": Scores.of(scores)}
    )


def _train(order: "Order", progress: Progress) -> float:
    """Make a few steps of the training; returns the seconds of those that are missing."""
    from penstock.workloads.language.reward.step_watch import StepWatch  # noqa: PLC0415 - loads transformers
    from penstock.workloads.language.reward.training import train  # noqa: PLC0415 - loads torch

    watch = StepWatch(STEPS, least=LEAST_STEPS, within_s=WITHIN_S)
    if train(order, progress.stop, [watch]) is None:
        raise Interrupted
    release_device()
    return missing_seconds([later - earlier for earlier, later in pairwise(watch.at_s)], watch.steps)


def missing_seconds(made: list[float], steps: int) -> float:
    """Return the seconds of the steps of a training that were not made.

    made: seconds of each that was. steps: of the whole training.
    """
    later = made[WARMUP_STEPS:] or made
    return max(0, steps - len(made)) * math.fsum(later) / max(len(later), 1)
