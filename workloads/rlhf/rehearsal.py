"""The preparation of a run of language models in short, for a dry run.

The reward model gets a few steps of its training.

The steps are those of the training itself: same model, batches, precision. What it does once, such as reading
the feedback, scoring the validation examples and saving, is done once here too and timed apart from the
steps. Everything else is made whole, since the calibration runs with it: the tiny model of the built-in task
takes seconds.

What `prepare` does not load this does not load either: the launcher's memory is part of what is predicted.
"""

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.config.estimate import Range, Scores
from penstock.config.preparation import Progress, Rehearsal, Shortened
from penstock.config.settings import Settings
from penstock.runtime.retry import Interrupted
from workloads.language.feedback.examples import Example, Scored
from workloads.language.feedback.reading import read
from workloads.rlhf.preparation import REWARD_MODEL, made_first, order_of, release_device, with_places

if TYPE_CHECKING:
    from workloads.language.reward.training import Order

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
    training = _shortened(order, progress)
    made["reward"] = str(order.out)
    return Rehearsal(
        settings=with_places(settings, made),
        shortened=(training,),
        scores={"feedback": scores_of(read(order.source).examples)},
    )


def scores_of(examples: tuple[Example, ...]) -> Scores:
    """Return the scores of responses that have one; pairs have none."""
    return Scores.of([example.score for example in examples if isinstance(example, Scored)])


def _shortened(order: "Order", progress: Progress) -> Shortened:
    from workloads.language.reward.step_watch import StepWatch  # noqa: PLC0415 - loads transformers
    from workloads.language.reward.training import train  # noqa: PLC0415 - loads torch

    watch, began_s = StepWatch(STEPS, least=LEAST_STEPS, within_s=WITHIN_S), time.monotonic()
    if train(order, progress.stop, [watch]) is None:
        raise Interrupted
    whole_s = time.monotonic() - began_s
    release_device()
    times = Times(
        whole_seconds=whole_s,
        steps_seconds=tuple(later - earlier for earlier, later in pairwise(watch.at_s)),
        epoch_seconds=watch.epoch_s,
        steps=watch.steps,
        epochs=order.settings.epochs,
    )
    return Shortened(name="reward model", seconds=whole_s, whole_seconds=expected(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of a training that was cut short, in seconds.

    steps_seconds: of each step made. epoch_seconds: of what follows an epoch, once. steps, epochs: of the
    whole training.
    """

    whole_seconds: float
    steps_seconds: tuple[float, ...]
    epoch_seconds: float
    steps: int
    epochs: float


def expected(times: Times) -> Range:
    """Return how long the whole training will take, in seconds.

    That is the time of the rehearsal, plus that of the steps and the ends of epochs still missing.
    """
    later = times.steps_seconds[WARMUP_STEPS:] or times.steps_seconds
    still = max(0, times.steps - len(times.steps_seconds))
    ends = max(0, math.ceil(times.epochs) - 1)
    return (
        Range.of([times.whole_seconds])
        + Range.of(_halves(later)).times(still)
        + Range.of([times.epoch_seconds]).times(ends)
    )


def _halves(seconds: tuple[float, ...]) -> list[float]:
    """Means of both halves: a single step is slow or fast by chance, many are not."""
    middle = len(seconds) // 2
    parts = [seconds[:middle], seconds[middle:]] if middle else [seconds]
    return [math.fsum(part) / len(part) for part in parts]
