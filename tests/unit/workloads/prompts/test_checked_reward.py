"""Rewards of a program that people check: never far from a person's judgement."""

import pytest

from penstock.workloads.language.reward.reward_source import Rewards, Sample, ScoredBy
from penstock.workloads.prompts.checked_reward import (
    JUDGED_BY,
    MOST_WAITING,
    CheckedReward,
    NeedsPerson,
    NoSuchCheck,
    SourceReward,
)


class Length:
    """A source that likes long texts."""

    def score(self, samples: list[Sample]) -> Rewards:
        """A tenth for each character."""
        return Rewards(tuple(len(one.response) / 10 for one in samples), ScoredBy(name="length"))

    def close(self) -> None:
        """Nothing is open."""


def reward_of(every: int) -> CheckedReward:
    """One of the source; its texts have one token each."""
    return CheckedReward(SourceReward(Length()), every=every)  # type: ignore[arg-type]


def test_one_of_so_many_scores_waits_for_a_person() -> None:
    reward = reward_of(3)
    earned = [reward.of("a", "a" * number, "a" * (number + 1)) for number in range(1, 7)]
    assert earned == pytest.approx([0.1] * 6)
    assert reward.of("a", "a", "a") == 0.0
    assert [(one.before, one.after) for one in reward.waiting()] == [("aaa", "aaaa"), ("a" * 6, "a" * 7)]


def test_a_person_agrees_or_does_not() -> None:
    reward = reward_of(1)
    reward.of("a", "a", "aa")
    reward.of("a", "aa", "a")
    one, other = reward.waiting()
    reward.answer(one.id, "after")
    reward.answer(other.id, "after")
    assert reward.checked() == (2, 1)
    with pytest.raises(NoSuchCheck):
        reward.answer(one.id, "after")
    with pytest.raises(NoSuchCheck):
        reward.find("absent")


def test_without_a_person_there_are_no_further_scores() -> None:
    reward = reward_of(1)
    for _ in range(MOST_WAITING):
        reward.of("a", "a", "aa")
    with pytest.raises(NeedsPerson, match="wait for a person"):
        reward.of("a", "a", "aa")
    reward.answer(reward.waiting()[0].id, "after")
    assert reward.of("a", "a", "aa") == pytest.approx(0.1)


def test_a_source_that_people_do_not_agree_with_is_asked_no_longer() -> None:
    reward = reward_of(1)
    for number in range(JUDGED_BY):
        reward.of("a", "a", "aa")
        reward.answer(reward.waiting()[0].id, "after" if number < JUDGED_BY // 2 - 1 else "before")
    with pytest.raises(NeedsPerson, match=f"4 of the last {JUDGED_BY}"):
        reward.of("a", "a", "aa")
