"""The names for programs in Python: data sets, a reward model, and what a trainer is told to train."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.training import TrainingResult as RunResult
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.rlhf.api import (
    DatasetConfig,
    FeedbackDataset,
    RewardModel,
    RewardModelConfig,
    RLHFTrainer,
    TrainingConfig,
    TrainingResult,
    prepare_feedback_dataset,
    prepare_ppo_dataset,
    train_reward_model,
)
from penstock.workloads.rlhf.sentiment import Sentiment

RECIPE = """
workload = "rlhf"
[template]
title = "of a gateway"
[environment]
id = "feedback"
[environment.kwargs]
model = "/models/base"
response_tokens = 8
[algorithm]
name = "token_ppo"
batch_steps = 504
"""


@pytest.fixture
def feedback(tmp_path: Path) -> str:
    """Forty scores, and a row that is none."""
    rows = [*Sentiment().scored(np.random.default_rng(0), 40), {"prompt": "the end"}]
    file = tmp_path / "feedback.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A template of a gateway."""
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    return file


def test_feedback_becomes_two_data_sets_without_a_common_prompt(base: Path, feedback: str) -> None:
    sides = prepare_feedback_dataset(feedback, DatasetConfig(model=str(base), scale="percent"))
    assert all(isinstance(side, FeedbackDataset) for side in sides)
    assert sum(map(len, sides)) == 40
    assert sides[0].bad.count == 1
    prompts = [{str(side[index].example.prompt) for index in range(len(side))} for side in sides]
    assert not prompts[0] & prompts[1]
    batch = next(iter(DataLoader(sides[0], batch_size=8, collate_fn=sides[0].collate)))
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["targets"].shape == (8,)
    assert batch["targets"].abs().max() <= 1.0


def test_prompts_are_of_one_side_each(base: Path, feedback: str) -> None:
    prompts = prepare_ppo_dataset(feedback, DatasetConfig(model=str(base), validation_share=0.25))
    train, held_out = ({one.index for one in side} for side in (prompts.train, prompts.held_out))
    assert train
    assert held_out
    assert not train & held_out


def test_a_reward_model_is_trained_and_scores(base: Path, feedback: str, tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch": 8, "rank": 2}
    config = RewardModelConfig(model=str(base), scale="percent", settings=settings)
    made = train_reward_model(feedback, config, tmp_path / "reward")
    samples = [Sample(prompt="the film", response="good")]
    loaded = RewardModel.load(tmp_path / "reward")
    assert loaded.score(samples).values == made.score(samples).values


def test_a_training_that_is_stopped_can_be_gone_on_with(base: Path, feedback: str, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    config = RewardModelConfig(model=str(base), scale="percent", settings={"epochs": 1, "rank": 2})
    with pytest.raises(Interrupted):
        train_reward_model(feedback, config, tmp_path / "reward", stop=stop)
    assert not (tmp_path / "reward" / "reward.json").exists()
    train_reward_model(feedback, config, tmp_path / "reward", resume=True)
    assert (tmp_path / "reward" / "reward.json").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": -1}, "epochs=-1"),
        ({"unheard": 1}, "unheard"),
        ({"batch": 8, "micro_batch": 3}, "micro_batch"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    settings: dict[str, object], said: str, base: Path, feedback: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train_reward_model(feedback, RewardModelConfig(model=str(base), settings=settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_scale_that_cannot_be_is_named(base: Path, feedback: str) -> None:
    with pytest.raises(ConfigurationError, match="use thumbs, stars"):
        prepare_feedback_dataset(feedback, DatasetConfig(model=str(base), scale="grades"))


def test_a_trainer_says_what_it_trains(recipe: Path, feedback: str) -> None:
    config = TrainingConfig(
        recipe, feedback, max_steps=3, learning_rate=1e-3, settings={"environment": {"kwargs": {"group": 2}}}
    )
    run = RLHFTrainer(config).run_config
    assert run.what == "feedback"
    assert run.settings == {
        "workload": "rlhf",
        "environment": {
            "id": "feedback",
            "kwargs": {
                "model": "/models/base",
                "response_tokens": 8,
                "feedback": feedback,
                "feedback_scale": "0:1",
                "group": 2,
            },
        },
        "algorithm": {"name": "token_ppo", "batch_steps": 504, "learning_rate": 1e-3},
        "learner": {"total_updates": 3, "total_steps": 1512},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [("[", "cannot be read as TOML"), ('[environment]\nid = "feedback"', "algorithm.batch_steps")],
)
def test_a_recipe_that_cannot_be_used_is_named(text: str, said: str, recipe: Path, feedback: str) -> None:
    recipe.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        RLHFTrainer(TrainingConfig(recipe, feedback))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        RLHFTrainer(TrainingConfig(recipe / "absent", feedback))


def ended(run_dir: Path) -> RunResult:
    """A run as `Job.result` tells of it."""
    summary = {"evaluation": {"mean": 0.5, "std": 0.1}}
    return RunResult(
        run_dir=run_dir,
        solved=False,
        interrupted=False,
        mean_return=0.5,
        updates=3,
        env_steps=9,
        summary=summary,
    )


def test_what_a_training_has_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--resume"):
        RLHFTrainer.result(ended(tmp_path))
    (tmp_path / "manifest.json").write_text('{"policy": "policies/v3"}')
    assert RLHFTrainer.result(ended(tmp_path)) == TrainingResult(
        policy_path=tmp_path / "policies" / "v3",
        reward_model_path=None,
        training_steps=3,
        reward_mean=0.5,
        reward_std=0.1,
        summary={"evaluation": {"mean": 0.5, "std": 0.1}},
    )
