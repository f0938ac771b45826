"""What a loop may be asked for."""

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.loop_state import LoopOrder


@pytest.mark.parametrize(
    "assignment",
    [
        "workload=control",
        "run=another",
        "environment.id=CartPole-v1",
        "environment.kwargs={}",
        "environment.kwargs.model=/elsewhere",
        "environment.kwargs.reward=/elsewhere",
        "learner.feed_from=/elsewhere",
        "policy.kwargs.begin_with=/elsewhere",
        "registry.url=sqlite:///elsewhere",
        "serving.policy=another",
    ],
)
def test_what_makes_a_round_is_not_set_by_a_setting(assignment: str) -> None:
    key = assignment.partition("=")[0]
    with pytest.raises(ConfigurationError, match=f"^--train {key}: the loop sets it in every round"):
        LoopOrder(train=(assignment,))


def test_how_a_round_learns_may_be_set() -> None:
    said = ("learner.total_steps=64", "environment.kwargs.max_new_tokens=4", "policy.kwargs.rank=2", "seed=3")
    assert LoopOrder(train=said).train == said
