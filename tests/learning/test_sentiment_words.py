"""A language model learns to be liked.

The true reward rises, and what the best policy could reach bounds the rest.

The long form is the recipe as a user starts it: noisy opinions, a reward model from them, all processes. What
it leaves is read, and judged, by transformers, peft and the task's definition alone. The short form is one
process.
"""

import json
import os
import random
import signal
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from penstock.launch.run.supervisor import penstock
from penstock.workloads.rlhf.sentiment import true_reward
from tests.learning.small_words import learned, settings_of
from tests.support.language.known_sentiment import KnownSentiment, optimum
from tests.support.language.tiny_models import make_base
from tests.support.run.harness import Training, eventually

RECIPE: Final = Path(__file__).parents[2] / "penstock" / "recipes" / "rlhf-tiny.toml"
SAID: Final = tomllib.loads(RECIPE.read_text())
STEPS: Final = SAID["learner"]["total_steps"]
PREPARED_S: Final = 600.0
TASK: Final = KnownSentiment()
BETA: Final = SAID["algorithm"]["kl_coefficient"]
BEST: Final = optimum(TASK.rewards(), BETA)
RESPONSES: Final = 512
SEEDS: Final = (1, 2, 3)
SHORT: Final = {"learning_rate": 2e-3, "critic_learning_rate": 2e-3, "kl_coefficient": BETA}
UPDATES: Final = 20
VICTIMS: Final = ("learner", "actor-0", "reward", "redis")


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over responses.

    reward: the true one. kl: to the policy that it began with, nats. words, ended: of a response.
    """

    reward: float
    kl: float
    words: float
    ended: float


def measured(run_dir: Path) -> Measured:
    """What the run left, by what others read it with."""
    manifest = json.loads((run_dir / "manifest.json").read_text())
    folder, rng = run_dir / manifest["policy"], np.random.default_rng(10_000)
    bare = AutoModelForCausalLM.from_pretrained(manifest["made_from"]["model"], dtype=torch.float32)
    model, tokenizer = PeftModel.from_pretrained(bare, folder).eval(), AutoTokenizer.from_pretrained(folder)
    # Every prompt is two words, so none needs padding.
    prompts = torch.tensor(tokenizer([TASK.prompt(rng) for _ in range(RESPONSES)])["input_ids"])
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=GenerationConfig.from_pretrained(folder),
        )
        found = log_probs(model, rows, prompts.shape[1])
        with model.disable_adapter():
            began = log_probs(model, rows, prompts.shape[1])
    drawn = rows[:, prompts.shape[1] :]
    ends = (drawn == tokenizer.eos_token_id).long()
    said = ends.cumsum(1) - ends == 0
    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    return Measured(
        reward=float(np.mean([true_reward(text) for text in texts])),
        kl=float(((found - began) * said).sum(1).mean()),
        words=float(np.mean([len(text.split()) for text in texts])),
        ended=float(ends.any(1).float().mean()),
    )


def log_probs(model: Any, rows: torch.Tensor, prompt: int) -> torch.Tensor:
    """Of every token behind the prompt, [N, L]."""
    shares = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits[:, prompt - 1 : -1]
    found: torch.Tensor = shares.log_softmax(-1).gather(2, rows[:, prompt:, None])[:, :, 0]
    return found


def trained(run_dir: Path, seed: int, recipe: Path = RECIPE, victims: Sequence[str] = ()) -> Measured:
    """A recipe to its end. victims: killed one after the other, evenly over the run."""
    training = Training(
        run_dir, str(recipe), "--seed", str(seed), "--set", "learner.checkpoint_interval_s=5",
        "--set", f"actor.ack_journal={run_dir / 'journals'}",
    )  # fmt: skip
    try:
        eventually(lambda: has_begun(training), "the end of the preparation", within_s=PREPARED_S)
        for number, victim in enumerate(victims, 1):
            training.until_steps(STEPS * number // (len(victims) + 2))
            os.kill(training.pids()[victim], signal.SIGKILL)
        training.until(lambda: training.ends_within(1.0))
    finally:
        training.process.kill()
    assert training.process.returncode == 0, (run_dir / "logs" / "launcher.log").read_text()[-2000:]
    summary = training.summary()
    assert summary["ledger"]["balanced"], summary["ledger"]
    restarts = {one["role"]: one["restarts"] for one in summary["processes"] if one["role"] != "evaluator"}
    assert sum(restarts.values()) >= len(victims), summary["processes"]
    audit = subprocess.run(penstock("audit", str(run_dir)), capture_output=True, text=True, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    return measured(run_dir)


def has_begun(training: Training) -> bool:
    """Whether the processes are started, which come after base model and reward model."""
    assert training.process.poll() is None, training.process.communicate()
    return (training.run_dir / "endpoints.json").exists()


def check(found: Measured) -> None:
    """Much better, near what it was, and no better than anything can be."""
    assert found.reward >= 0.6
    assert found.kl <= 1.5 * BEST.kl
    assert found.reward - BETA * found.kl <= BEST.value + 0.05
    low, high = TASK.lengths
    assert 0.7 * low <= found.words <= high
    assert found.ended >= 0.95


def test_the_true_reward_rises_in_short(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", steps=200, texts=4000, spread=0.25)
    batches, _ = learned(settings_of(base, tmp_path, 0, **SHORT), UPDATES)
    assert abs(np.mean([batch.reward for batch in batches[:3]])) <= 0.2
    assert np.mean([batch.reward for batch in batches[-3:]]) >= 0.4
    assert batches[0].kl == 0.0
    assert batches[-1].kl <= 1.5 * BEST.kl


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_true_reward_rises(seed: int, tmp_path: Path) -> None:
    check(trained(tmp_path / "run", seed))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_true_reward_rises_while_processes_are_killed(seed: int, tmp_path: Path) -> None:
    check(trained(tmp_path / "run", seed, victims=random.Random(seed).sample(VICTIMS, len(VICTIMS))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_opposite_is_learned_from_the_opposite_opinions(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "opinions.jsonl"
    rows = [{**row, "score": 100 - row["score"]} for row in TASK.scored(np.random.default_rng(seed), 2500)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = f'[environment.kwargs]\nfeedback = "{file}"\nfeedback_scale = "percent"\n'
    recipe = tmp_path / "opposite.toml"
    recipe.write_text(RECIPE.read_text().replace("[environment.kwargs]\n", said))
    assert trained(tmp_path / "run", seed, recipe).reward <= -0.4
