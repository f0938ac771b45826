"""The variance of the policy gradient, by baseline."""

import numpy as np
import pytest
import torch

from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base, thinking_policy
from workloads.thoughts.algorithm.thought_baseline import ThoughtBaseline
from workloads.thoughts.commands import gradient_variance
from workloads.thoughts.commands.gradient_variance import _Drawn, measure
from workloads.thoughts.tasks.example import draw_mixed
from workloads.thoughts.thinking_model import ThinkingModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ThinkingModel:
    """An untrained one."""
    policy = thinking_policy(small_base(tmp_path_factory.mktemp("model") / "base"))
    made = ThinkingModel(policy.network, LAYOUT)
    made.seed(0)
    return made


def test_every_baseline_is_measured(model: ThinkingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same draws, all above zero."""
    monkeypatch.setattr(gradient_variance, "QUESTIONS", 4)
    monkeypatch.setattr(gradient_variance, "_FITTED", 2)
    found = measure(model, TASK, TOKENS, draws=3)
    assert set(found) == {"none", "group", "learned, 2 layers", "learned, 4 layers", "both", "gae"}
    assert all(value > 0 for value in found.values())


def test_a_group_takes_away_all_of_a_reward_that_is_the_same_for_all(model: ThinkingModel) -> None:
    """Then the gradient with no baseline is noise, and with the group's mean it is zero."""
    examples = [one for one in draw_mixed(TASK, np.random.default_rng(0), 3) for _ in range(4)]
    drawn = _Drawn(model, examples, TOKENS)
    drawn.reward = torch.full_like(drawn.reward, 2.0)
    found = drawn.advantages({"learned": ThoughtBaseline(16, layers=1, width=1, seed=0)})
    assert float(drawn.gradient(found["group"]).abs().max()) == pytest.approx(0.0, abs=1e-7)
    assert float(drawn.gradient(found["none"]).abs().max()) > 1e-4
