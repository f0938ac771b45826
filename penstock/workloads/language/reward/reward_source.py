"""Where rewards come from, as a caller sees it: samples in, one reward or none for each out.

    RewardService   a reward model in a process of its own                  reward/client.py
    callable        a Python function of this machine                       reward/callable.py
    HTTP            an endpoint that answers JSON                           reward/endpoint.py

A reward that a source does not give is None, never a number that stands for it: −1.0 and 0.0 are rewards.

    RewardError                  everything here
      BadReward     ValueError   the source gave what is no reward: NaN, too few, something else than numbers
      BadSample     ValueError   a sample cannot be scored, and no repetition changes it
      Unavailable   OSError      no answer in the time there was
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.workloads.language.prompt import Prompt


class RewardError(Exception):
    """A call for rewards that came to nothing."""


class BadReward(RewardError, ValueError):
    """The source gave what is no reward."""


class BadSample(RewardError, ValueError):
    """A sample that cannot be scored."""


class Unavailable(RewardError, OSError):
    """No answer in the time there was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A response to a prompt, as text, as token ids of the reward model's own tokenizer, or both.

    A reward model reads the ids where `response_ids` has any: they are what was sampled, text may be
    tokenised otherwise. Functions and endpoints read the text.
    cut_short: the limit on its length ended the response, which did not come to its own end.
    """

    prompt: Prompt = ""
    response: str = ""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    cut_short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBy:
    """Whose rewards they are. sha256: of its weights or its source, "" where that cannot be known.

    mean, std: of its scores over a reference set; None where not measured.
    """

    name: str
    sha256: str = ""
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True, slots=True)
class Rewards:
    """A reward, or None, for each sample in order."""

    values: tuple[float | None, ...]
    by: ScoredBy


class RewardSource(Protocol):
    """Gives rewards; used by any number of threads."""

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return their rewards; raises BadReward, BadSample, Unavailable."""

    def close(self) -> None:
        """Let go of connections; a call that waits raises Unavailable."""


def checked(values: Sequence[Any], expected: int, whose: str) -> tuple[float | None, ...]:
    """Return the values as rewards; raises BadReward that names the first that is none."""
    if len(values) != expected:
        raise BadReward(f"{whose}: {len(values)} rewards for {expected} samples")
    return tuple(_reward(value, index, whose) for index, value in enumerate(values))


def _reward(value: Any, index: int, whose: str) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise BadReward(
            f"{whose}: reward {index} is {value!r}: give a finite number, or none where there is no reward"
        )
    return float(value)
