"""Real processes train a language model by `penstock train`, and one of them is killed.

The tests also look at what the run leaves for other programs.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.launch.run.supervisor import penstock
from tests.support.language.tiny_models import make_base
from tests.support.run.harness import Training, wait_until_gone

STEPS = 3000
CONFIG = """
workload = "rlhf"
run = "words"
[environment]
id = "words"
count = 16
[environment.kwargs]
model = "{base}"
prompts = "{prompts}"
reward = "{reward}"
serve_reward = true
reward_reads = "tokens"
response_tokens = 8
held_out = 0.2
[policy.kwargs]
rank = 4
critic = "adapter"
[actor]
unroll_length = 12
ack_journal = "{folder}/run/journals"
[algorithm]
batch_steps = 192
learning_rate = 2e-3
[learner]
total_steps = {steps}
checkpoint_interval_s = 1
[evaluation]
episodes = 8
"""


@pytest.fixture
def taught(tmp_path: Path) -> Path:
    """A tiny language model that writes words.

    `<pad>` and the like, which text does not show, are never drawn.
    """
    return make_base(tmp_path / "taught", steps=150, texts=2000)


@pytest.fixture
def training(taught: Path, reward: Path, prompts: Path, tmp_path: Path) -> Iterator[Training]:
    """Of that model, with a reward model that was taught nothing; nothing is left of it afterwards."""
    file = tmp_path / "words.toml"
    file.write_text(CONFIG.format(base=taught, reward=reward, prompts=prompts, folder=tmp_path, steps=STEPS))
    training = Training(tmp_path / "run", str(file), "--json")
    yield training
    training.process.kill()
    training.process.communicate()
    wait_until_gone(training)


def test_a_run_survives_its_reward_service_and_leaves_a_policy_that_others_read(
    training: Training, taught: Path
) -> None:
    training.until_steps(STEPS // 4)
    os.kill(training.pids()["reward"], signal.SIGKILL)
    code, out, err = training.end()
    assert code == 0, err
    summary = json.loads(out)
    assert summary["env_steps"] >= STEPS
    assert {one["role"] for one in summary["processes"]} >= {"reward", "learner", "actor", "evaluator"}
    assert next(one["restarts"] for one in summary["processes"] if one["role"] == "reward") == 1
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert summary["evaluation"]["version"] == summary["policy_version"]
    check_base(summary)
    last = json.loads((training.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["left_out"] == 0
    assert said(training, "audit").returncode == 0
    check_policy(training, taught)


def check_base(summary: dict[str, Any]) -> None:
    """What training began with is beside the last version, on as many episodes, and the KL between them."""
    evaluation = summary["evaluation"]
    base = evaluation["base"]
    assert base["episodes"] == evaluation["episodes"] == 8
    assert base["difference"] == pytest.approx(evaluation["mean"] - base["mean"])
    assert base["verdict"] in {"better", "worse", "chance"}
    # What was trained says something else than what it was trained from.
    assert base["std"] > 0
    assert base["difference"] != 0
    assert summary["kl_reference"] > 0


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
    told = said(training, "rlhf generate", "--prompt", "apple bird", "--count", "2", "--json")
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


def said(training: Training, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What a command says of the run."""
    call = penstock(*command.split(), str(training.run_dir), *arguments)
    return subprocess.run(call, capture_output=True, text=True, check=False)
