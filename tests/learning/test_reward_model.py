"""A reward model trained on noisy opinions orders responses about as well as anything could."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.workloads.language.feedback import Source, parse_scale
from penstock.workloads.language.reward.reward_model import RewardModel
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.reward.training import Order, train
from penstock.workloads.language.settings import RewardTraining
from penstock.workloads.rlhf.sentiment import true_reward
from tests.support.language.known_sentiment import Distribution, KnownSentiment, expected_pair_accuracy
from tests.support.language.known_sentiment import pairs as pairs_of
from tests.support.language.tiny_models import make_base

TASK = KnownSentiment()


def trained(folder: Path, kind: str, seed: int) -> RewardModel:
    """On 2,500 scores, or 6,000 pairs, with LoRA on a model that was taught for some steps only."""
    rng = np.random.default_rng(seed)
    rows = TASK.scored(rng, 2500) if kind == "scores" else pairs_of(TASK, rng, 6000)
    file = folder / "feedback.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = Order(
        source=Source(place=str(file), scale=parse_scale("percent")),
        base=str(make_base(folder / "base", steps=50)),
        out=folder / "reward",
        settings=RewardTraining(epochs=8 if kind == "scores" else 5, batch=64, learning_rate=3e-3, seed=seed),
    )
    assert train(order, threading.Event()) is not None
    return RewardModel.load(folder / "reward")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["scores", "pairs"])
def test_a_reward_model_comes_close_to_the_ceiling(tmp_path: Path, kind: str, seed: int) -> None:
    model = trained(tmp_path, kind, seed)
    rng = np.random.default_rng(1000 + seed)
    samples = [Sample(prompt=TASK.prompt(rng), response=TASK.response(rng)) for _ in range(500)]
    scores = np.array([value for value in model.score(samples).values if value is not None])
    accuracy, ceiling = expected_pair_accuracy(TASK, [one.response for one in samples], scores.tolist())
    assert 0.7 < ceiling < 0.8
    assert accuracy >= ceiling - 0.03
    if kind == "scores":
        rewards = np.array([true_reward(one.response) for one in samples])
        alike = Distribution(rewards, np.full(len(rewards), 1 / len(rewards)))
        excess = float(np.mean((scores - TASK.expected_score(rewards)) ** 2))
        assert excess <= 0.15 * TASK.bayes_mse(alike)
