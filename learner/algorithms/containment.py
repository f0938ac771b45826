"""An update that fails is brought home to the fragments that cause it, and made without them.

    attempt on the whole batch → applied: done
                               → not: try halves without leaving a trace, halves of the bad ones, …
                                      → culprits by fragment → attempt on the rest

A failure is an exception, a number that is not finite, or one that no honest actor sends. Fragments that are
good alone and bad together have no culprit: the update fails as a whole, as it would have without this. An
exception of every fragment is no fragment's fault: it is raised.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import torch

from penstock.learner.algorithms.algorithm import Update
from penstock.learner.batch import Batch
from penstock.learner.ranks.group import RankGroup

EMPTY: Final = "empty"
NAN: Final = "nan"
IMPLAUSIBLE: Final = "implausible"
ERROR: Final = "error"

ATTRIBUTABLE: Final = (RuntimeError, ValueError, LookupError, ArithmeticError)
"""What a fragment may make arithmetic raise."""
OF_THE_DEVICE: Final = (torch.OutOfMemoryError, torch.AcceleratorError)
"""These say nothing of a fragment: too little memory, or a device that has lost its state."""

log = logging.getLogger(__name__)


class Attempt(Protocol):
    """Makes the update of a batch, and leaves everything as it was where it fails or is a rehearsal."""

    def __call__(self, batch: Batch, *, is_rehearsal: bool) -> Update: ...


def verdict(judged: Sequence[float], max_log_ratio: float = math.inf) -> str:
    """Why an update is not kept, or "".

    judged: what must be finite; the last is the largest |log π/μ|, where it is bounded.
    """
    if max_log_ratio < judged[-1] < math.inf:
        return IMPLAUSIBLE
    return "" if all(map(math.isfinite, judged)) else NAN


def contained(attempt: Attempt, batch: Batch, group: RankGroup | None = None) -> Update:
    """Return the update of a batch, or that of its fragments which do not make it fail.

    group: the ranks that make it together, each with fragments of its own; None: one rank. All of them find
    the same culprits, because whether an attempt fails is judged on what they have computed together.

    Raises what `attempt` raises where no single fragment is the cause, and with several ranks at once: the
    others wait inside of the same attempt.
    """
    group = group or RankGroup()
    tried = partial(_tried, attempt) if group.size == 1 else attempt
    whole = tried(batch, is_rehearsal=False)
    if whole.applied or whole.reason == EMPTY or not batch.sources:
        return _or_raised(whole)
    own = [place for place, source in enumerate(batch.sources) if source.columns]
    numbers, first = group.listed([batch.sources[place].number for place in own])
    everyone = range(len(numbers))

    def part(chosen: Collection[int]) -> Batch:
        return batch.of_fragments([place for at, place in enumerate(own, first) if at in chosen])

    def trial(chosen: Collection[int]) -> str:
        update = tried(part(chosen), is_rehearsal=True)
        return "" if update.applied or update.reason == EMPTY else update.reason

    found = culprits(trial, everyone)
    if not found or (len(found) == len(everyone) > 1):
        return _or_raised(whole)
    if len(found) == len(everyone):
        if whole.error is not None:
            log.error("a fragment made its update fail", exc_info=whole.error)
        return whole
    rest = attempt(part([one for one in everyone if one not in found]), is_rehearsal=False)
    if not rest.applied:
        return _or_raised(whole)
    left_out = int(group.sum_(part(found).valid.sum()))
    by_number = {numbers[one]: reason for one, reason in found.items()}
    return replace(rest, culprits=by_number, left_out=left_out)


def culprits(trial: Callable[[Sequence[int]], str], suspects: Sequence[int]) -> dict[int, str] | None:
    """Return the suspects that fail alone, with the reason; None: some fail together only.

    trial: why some of them fail together, or "". Suspects that fail are halved until one is left, so that k
    culprits among n cost about 2 k log n trials.
    """
    if len(suspects) == 1:
        why = trial(suspects)
        return {suspects[0]: why} if why else None
    middle = len(suspects) // 2
    bad = [half for half in (suspects[:middle], suspects[middle:]) if trial(half)]
    found: dict[int, str] = {}
    for half in bad:
        among = culprits(trial, half)
        if among is None:
            return None
        found |= among
    return found or None


def _tried(attempt: Attempt, batch: Batch, *, is_rehearsal: bool) -> Update:
    try:
        return attempt(batch, is_rehearsal=is_rehearsal)
    except OF_THE_DEVICE:
        raise
    except ATTRIBUTABLE as error:
        return Update(applied=False, reason=ERROR, error=error)


def _or_raised(update: Update) -> Update:
    if update.error is not None:
        raise update.error
    return update
