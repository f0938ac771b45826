"""Rewards for responses: what a source is shown, and what becomes of its answers."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.runtime.exit import Fatal
from penstock.workloads.language.reward.reward_source import BadReward, Rewards, Sample, ScoredBy, Unavailable
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.rlhf.responses import PromptTokens, RewardScorer


class Recorder:
    """A source that keeps what it was shown and answers as it is told, in turn."""

    def __init__(self, *answers: Rewards | Exception) -> None:
        self.shown: list[Sample] = []
        self._answers = list(answers)

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """The next answer."""
        self.shown = list(samples)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Nothing is held."""


def rewards(*values: float | None, mean: float | None = None, std: float | None = None) -> Rewards:
    """Of a model with these statistics."""
    return Rewards(values, ScoredBy(name="model", mean=mean, std=std))


def responses(base: Path) -> tuple[list[PromptTokens], list[tuple[int, ...]]]:
    """One that ended with <eos> and one that did not."""
    ids = load_tokenizer(str(base))
    good, bad = (ids.convert_tokens_to_ids(word) for word in ("good", "bad"))
    return [PromptTokens(0, "apple", (1, 9))] * 2, [(good, bad, ids.eos_token_id), (bad, bad)]


def scorer(
    base: Path, source: Recorder, *, reads_tokens: bool = False, standardise: bool = False
) -> RewardScorer:
    """Of the tiny tokenizer."""
    return RewardScorer(source, load_tokenizer(str(base)), reads_tokens=reads_tokens, standardise=standardise)


def test_a_source_reads_text_unless_it_has_the_tokenizer(base: Path) -> None:
    source = Recorder(rewards(1.0, 2.0), rewards(1.0, 2.0))
    asked = responses(base)
    scorer(base, source).score(*asked, lambda: False)
    assert source.shown == [
        Sample(prompt="apple", response="good bad"),
        Sample(prompt="apple", response="bad bad", cut_short=True),
    ]
    scorer(base, source, reads_tokens=True).score(*asked, lambda: False)
    assert [one.response_ids for one in source.shown] == asked[1]
    assert source.shown[0].prompt_ids == (1, 9)


def test_a_source_that_is_away_is_asked_again(base: Path) -> None:
    source = Recorder(Unavailable("away"), Unavailable("away"), rewards(0.0, None))
    given = scorer(base, source).score(*responses(base), lambda: False)
    assert given is not None
    assert given.values == (0.0, None)


def test_no_reward_is_waited_for_when_the_work_is_over(base: Path) -> None:
    assert scorer(base, Recorder(Unavailable("away"))).score(*responses(base), lambda: True) is None


class Hanging:
    """A source that does not answer before it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Not in the life of this source."""
        self._closed.wait()
        raise Unavailable("closed")

    def close(self) -> None:
        """Let the caller go."""
        self._closed.set()


def test_a_call_that_hangs_holds_up_no_other(base: Path) -> None:
    hung = RewardScorer(Hanging(), load_tokenizer(str(base)), reads_tokens=False, standardise=False)
    assert hung.score(*responses(base), lambda: True) is None
    hung.close()


def test_what_no_repetition_changes_ends_the_actor(base: Path) -> None:
    with pytest.raises(Fatal, match=r"environment\.kwargs\.reward: NaN"):
        scorer(base, Recorder(BadReward("NaN"))).score(*responses(base), lambda: False)


def test_standardised_rewards_are_in_standard_deviations(base: Path) -> None:
    source = Recorder(rewards(3.0, None, mean=1.0, std=4.0), rewards(99.0, -99.0, mean=1.0, std=4.0))
    scaled = scorer(base, source, standardise=True)
    values = [scaled.score(*responses(base), lambda: False) for _ in range(2)]
    assert [one.values for one in values if one] == [(0.5, None), (5.0, -5.0)]
    with pytest.raises(Fatal, match="does not say the mean and std"):
        scorer(base, Recorder(rewards(1.0, 2.0)), standardise=True).score(*responses(base), lambda: False)
