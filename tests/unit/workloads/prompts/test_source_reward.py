"""Rewards of prompts from elsewhere."""

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.reward.reward_source import BadReward
from penstock.workloads.prompts.categories import TOKEN_PRICE
from penstock.workloads.prompts.checked_reward import SourceReward, source_reward
from penstock.workloads.prompts.features import mutate
from penstock.workloads.prompts.tasks import PromptTask

PROMPT = "Write a poem."
ASKED: list[str] = []


def section_count(prompts: list[str], texts: list[str]) -> list[float | None]:
    """One for each section; `prompts` are those that the episodes began with."""
    assert set(prompts) == {PROMPT}
    ASKED.extend(texts)
    return [float(text.count("\n\n")) for text in texts]


def nothing(prompts: list[str], texts: list[str]) -> list[float | None]:
    """No score for any."""
    return [None] * len(texts)


def test_a_step_earns_the_difference_of_two_scores_and_each_text_is_scored_once() -> None:
    ASKED.clear()
    reward = source_reward(f"{__name__}:section_count")
    bound = mutate(PROMPT, 3)
    assert reward.of(PROMPT, PROMPT, bound) == pytest.approx(1 - 16 * TOKEN_PRICE)
    assert reward.of(PROMPT, bound, bound) == 0.0
    reward.of(PROMPT, bound, mutate(bound, 0))
    assert ASKED == [PROMPT, bound, mutate(bound, 0)]


def test_a_source_without_a_score_is_an_error_that_names_it() -> None:
    with pytest.raises(BadReward, match="nothing: gave no score"):
        source_reward(f"{__name__}:nothing").of(PROMPT, PROMPT, mutate(PROMPT, 3))


@pytest.mark.parametrize("place", ["somewhere", "no.such.module:function", "/a/folder", "http://"])
def test_what_names_no_source_is_refused(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"http|cannot be loaded"):
        source_reward(place)


def test_the_environment_takes_it() -> None:
    task = PromptTask(reward_source=f"{__name__}:nothing")
    assert isinstance(task._parts.reward, SourceReward)
    task.close()
