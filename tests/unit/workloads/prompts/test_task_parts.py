"""Settings of a task are its embeddings and its rewards, or are refused by name."""

import math
from typing import Any

import gymnasium
import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.prompts.checked_reward import CheckedReward, SourceReward
from penstock.workloads.prompts.embeddings import HttpEmbedder
from penstock.workloads.prompts.task_parts import parts_of


def length(prompts: list[Any], responses: list[str]) -> list[float]:
    """A source of rewards."""
    del prompts
    return [float(len(one)) for one in responses]


SOURCE = f"{__name__}:length"


def test_each_setting_has_its_part() -> None:
    found = parts_of({"embedding": "http", "embedding_url": "http://127.0.0.1:1/", "reward": "ratings"})
    assert isinstance(found.embedder, HttpEmbedder)
    assert (found.reward, found.needs_people) == (None, True)
    assert isinstance(parts_of({"reward_source": SOURCE}).reward, SourceReward)
    checked = parts_of({"reward_source": SOURCE, "human_check_every": 5})
    assert isinstance(checked.reward, CheckedReward)
    assert checked.needs_people
    assert not parts_of({}).needs_people


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ({"human_check_every": 5}, "human_check_every"),
        ({"human_check_every": -1, "reward_source": SOURCE}, "human_check_every=-1"),
        ({"human_check_every": True, "reward_source": SOURCE}, "human_check_every=True"),
        ({"human_check_every": 1.5, "reward_source": SOURCE}, "human_check_every=1.5"),
        ({"reward": "ratings", "reward_source": SOURCE}, "reward='ratings'"),
        ({"embedding": "http"}, "embedding_url"),
        ({"embedding": "minilm"}, "embedding='minilm'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(task: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parts_of(task)


@pytest.mark.parametrize("task", [{"reward": "ratings"}, {"reward_source": SOURCE, "human_check_every": 3}])
def test_an_actor_has_no_people_who_rate(task: dict[str, Any]) -> None:
    made = gymnasium.make("penstock.workloads.prompts.tasks:Prompts-v0", **task)
    assert made.action_space.n == 5  # type: ignore[attr-defined]
    made.reset(seed=1)
    assert math.isnan(float(made.step(0)[1]))
    with pytest.raises(ConfigurationError, match="over HTTP"):
        made.step(0)
    made.close()
