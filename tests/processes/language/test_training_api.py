"""A program in Python trains a policy from feedback by the shipped recipe, and reads what was made."""

import json
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.rlhf.api import RewardModel, RLHFTrainer, TrainingConfig
from penstock.workloads.rlhf.sentiment import Sentiment

RECIPE: Final = Path(__file__).parents[3] / "penstock" / "recipes" / "service" / "quick.toml"
PATIENCE_S: Final = 900.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_policy_is_trained_from_feedback(tmp_path: Path) -> None:
    feedback = tmp_path / "feedback.jsonl"
    rows = Sentiment().scored(np.random.default_rng(0), 60)
    feedback.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainingConfig(RECIPE, feedback, scale="percent", max_steps=2, run_dir=tmp_path / "first")
    first = RLHFTrainer(config).train(PATIENCE_S)
    assert first.training_steps == 2
    assert first.reward_mean is not None
    assert (first.policy_path / "adapter_model.safetensors").exists()
    assert first.reward_model_path is not None
    model = RewardModel.load(first.reward_model_path)
    assert len(model.score([Sample(prompt="the film", response="good")]).values) == 1

    again = TrainingConfig(
        RECIPE,
        feedback,
        scale="percent",
        model=tmp_path / "first" / "base_model",
        reward_model=first.reward_model_path,
        max_steps=1,
        run_dir=tmp_path / "second",
    )
    second = RLHFTrainer(again).train(PATIENCE_S)
    assert (second.training_steps, second.reward_model_path) == (1, None)
