"""Real processes train a language model by `penstock train`, and one of them is killed.

The tests also look at what the run leaves for other programs.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.launch.run.supervisor import penstock
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.rlhf.api import RewardModel, RLHFTrainer, TrainingConfig
from penstock.workloads.rlhf.sentiment import Sentiment
from tests.support.abuse.identities import leaves_no_secret, locked_redis
from tests.support.language.language_learner import words_file
from tests.support.language.tiny_models import make_base
from tests.support.run.harness import Training, reward_endpoint, wait_until_gone

STEPS = 3000


@pytest.fixture
def taught(tmp_path: Path) -> Path:
    """A tiny language model that writes words.

    `<pad>` and the like, which text does not show, are never drawn.
    """
    return make_base(tmp_path / "taught", steps=150, texts=2000)


@pytest.fixture
def training(taught: Path, reward: Path, prompts: Path, tmp_path: Path) -> Iterator[Training]:
    served = {"serve_reward": True, "reward_reads": "tokens", "held_out": 0.2}
    file = words_file(
        tmp_path,
        taught,
        prompts,
        reward,
        environment={"count": 16, "kwargs": served},
        policy={"kwargs": {"critic": "adapter"}},
        learner={"total_steps": STEPS, "checkpoint_interval_s": 1},
    )
    training = Training(tmp_path / "run", file, "--json")
    yield training
    training.process.kill()
    training.process.communicate()
    wait_until_gone(training)


def test_a_run_survives_its_reward_service_and_writes_a_readable_policy(
    training: Training, taught: Path
) -> None:
    training.until_steps(STEPS // 4)
    os.kill(training.pids()["reward"], signal.SIGKILL)
    summary = training.completed()
    assert summary["env_steps"] >= STEPS
    assert {one["role"] for one in summary["processes"]} >= {"reward", "learner", "actor", "evaluator"}
    assert next(one["restarts"] for one in summary["processes"] if one["role"] == "reward") == 1
    assert summary["evaluation"]["version"] == summary["policy_version"]
    evaluation = summary["evaluation"]
    base = evaluation["base"]
    assert base["episodes"] == evaluation["episodes"] == 8
    assert base["difference"] == pytest.approx(evaluation["mean"] - base["mean"])
    assert base["verdict"] in {"better", "worse", "chance"}
    # What was trained says something else than what it was trained from.
    assert base["std"] > 0
    assert base["difference"] != 0
    assert summary["kl_reference"] > 0
    last = json.loads((training.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["left_out"] == 0
    training.audited()
    check_policy(training, taught)


def check_policy(training: Training, base: Path) -> None:
    """Transformers and peft read the policy and give a response the log-probability it was drawn with.

    `penstock rlhf generate` draws the response and says its log-probability.
    """
    manifest = json.loads((training.run_dir / "manifest.json").read_text())
    folder = training.run_dir / manifest["policy"]
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model, tokenizer = PeftModel.from_pretrained(bare, folder).eval(), AutoTokenizer.from_pretrained(folder)
    adapter = load_file(folder / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    # What values were made by is the learner's: beside the versions, and in none.
    critic = load_file(training.run_dir / "value_head.safetensors")
    trained = [tensor for name, tensor in critic.items() if name.startswith("adapter.") and "lora_B" in name]
    assert trained
    assert all(tensor.abs().max() > 0 for tensor in trained)
    words = ("rlhf", "generate", str(training.run_dir), "--prompt", "apple bird", "--count", "2", "--json")
    told = subprocess.run(penstock(*words), capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    answers = [json.loads(line) for line in told.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["apple bird"] * 2
    prompt = tokenizer("apple bird")["input_ids"]
    for answer in answers:
        row = torch.tensor([[*prompt, *answer["tokens"]]])
        with torch.inference_mode():
            shares = model(input_ids=row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = shares.gather(1, row[0, len(prompt) :, None]).sum()
        assert answer["log_prob"] == pytest.approx(float(found), abs=1e-3)


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

    again = replace(config, max_steps=1, run_dir=tmp_path / "second", reward_model=first.reward_model_path)
    again = replace(again, model=tmp_path / "first" / "base_model")
    second = RLHFTrainer(again).train(PATIENCE_S)
    assert (second.training_steps, second.reward_model_path) == (1, None)


@pytest.mark.slow
def test_a_run_of_language_models_leaves_no_secret(
    base: Path, prompts: Path, short_folder: Path, tmp_path: Path
) -> None:
    told: list[str | None] = []

    def answer(asked: Any, authorization: str | None) -> tuple[int, bytes]:
        told.append(authorization)
        return 200, json.dumps({"rewards": [0.5] * len(asked["samples"])}).encode()

    with reward_endpoint(answer) as reward, locked_redis(short_folder) as locked:
        file = words_file(
            tmp_path,
            base,
            prompts,
            reward,
            environment={"kwargs": {"response_tokens": 4}},
            algorithm={"batch_steps": 48},
            learner={"total_steps": 96},
            evaluation={"episodes": 2},
        )
        leaves_no_secret(locked, tmp_path, file, (), runs="words")
    assert told
    assert set(told) == {"Bearer planted-0d9f-one"}
