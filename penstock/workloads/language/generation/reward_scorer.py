"""Rewards for responses, from whichever source the configuration of this machine names.

A source that does not answer is asked again until the actor's work is over: what was generated waits, and
health turns red when that takes too long. What no repetition changes ends the actor with the reason.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Final, NamedTuple

from penstock.runtime.compute_threads import ComputePool
from penstock.runtime.exit import Fatal
from penstock.workloads.language.prompt import Prompt
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    BadSample,
    Rewards,
    RewardSource,
    Sample,
    ScoredBy,
    Unavailable,
)
from penstock.workloads.language.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_TELL_S: Final = 0.1
CLIP: Final = 5.0
"""Most standard deviations of a standardised reward."""


class Response(NamedTuple):
    """A response that came to its end. ids: of its tokens, `<eos>` among them where it ended with one."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


class RewardScorer:
    """Scores responses; used by one thread."""

    def __init__(
        self, source: RewardSource, tokenizer: Tokenizer, *, reads_tokens: bool, standardise: bool
    ) -> None:
        """reads_tokens: the source has this very tokenizer. standardise: as `section.Language` says."""
        self._source, self._tokenizer = source, tokenizer
        self._caller = ComputePool(1, "rewards")
        self._reads_tokens, self._standardise = reads_tokens, standardise

    def score(self, responses: Sequence[Response], is_over: Callable[[], bool]) -> Rewards | None:
        """Return their rewards; None when `is_over` before there was an answer. Raises Fatal."""
        samples = [self._sample(one) for one in responses]
        while True:
            call = self._caller.submit(self._source.score, samples)
            # `is_over` is polled: it cannot wake this thread.
            while not wait([call], _TELL_S).done:
                if is_over():
                    return None
            try:
                rewards = call.result()
            except Unavailable as error:
                if is_over():
                    return None
                log.warning("no rewards yet", extra={"why": str(error)})
            except (BadReward, BadSample) as error:
                raise Fatal(f"environment.kwargs.reward: {error}") from error
            else:
                return _standardised(rewards) if self._standardise else rewards

    def close(self) -> None:
        """Let go of the source, and so end a call that still waits."""
        self._source.close()
        self._caller.shutdown()

    def _sample(self, response: Response) -> Sample:
        text = self._tokenizer.decode(response.ids, skip_special_tokens=True)
        cut_short = response.ids[-1] != self._tokenizer.eos_token_id
        if not self._reads_tokens:
            return Sample(prompt=response.prompt, response=text, cut_short=cut_short)
        return Sample(
            prompt=response.prompt,
            response=text,
            prompt_ids=response.prompt_ids,
            response_ids=response.ids,
            cut_short=cut_short,
        )


def _standardised(rewards: Rewards) -> Rewards:
    mean, std = _scale(rewards.by)
    values = [None if one is None else max(-CLIP, min(CLIP, (one - mean) / std)) for one in rewards.values]
    return Rewards(tuple(values), rewards.by)


def _scale(by: ScoredBy) -> tuple[float, float]:
    if by.mean is None or not by.std:
        raise Fatal(
            f"environment.kwargs.standardise=true: {by.name} does not say the mean and std of its scores; "
            "use a reward model that `penstock rlhf reward train` saved, or false"
        )
    return by.mean, by.std
