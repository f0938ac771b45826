"""A run without a rollout worker learns from an agent that knows OpenAI's API alone."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.rlhf.sentiment import true_reward
from tests.support.language.agents_run import gateway
from tests.support.language.language_learner import words_file
from tests.support.language.tiny_models import make_base
from tests.support.run.harness import Training, wait_until_gone

STEPS: Final = 700
PATIENCE_S: Final = 120.0


@pytest.fixture(
    params=[{}, pytest.param({"lora": False}, marks=pytest.mark.slow)], ids=["adapter", "all-weights"]
)
def training(
    request: pytest.FixtureRequest, reward: Path, prompts: Path, tmp_path: Path, short_folder: Path
) -> Iterator[Training]:
    base = make_base(tmp_path / "taught", steps=150, texts=2000)
    tokenizer = load_tokenizer(str(base))
    tokenizer.chat_template = tiny_models.CHAT_TEMPLATE
    tokenizer.save_pretrained(base)
    file = words_file(
        tmp_path,
        base,
        prompts,
        reward,
        environment={"kwargs": {"held_out": 0.2}},
        policy={"kwargs": request.param},
        actor={"count": 0, "unroll_length": 40},
        serving={"listen": f"unix:{short_folder}/text.sock"},
        learner={"total_steps": STEPS},
    )
    training = Training(tmp_path / "run", file, "--json")
    yield training
    training.process.kill()
    training.process.communicate()
    wait_until_gone(training)


def converse(client: Any, number: int) -> bool:
    name, messages, learned = f"talk-{number}", list[Any](), True
    for turn, words in enumerate(("apple bird", "moon road")):
        messages.append({"role": "user", "content": words})
        made = client.chat.completions.create(
            model="default", messages=messages, metadata={"conversation_id": name}
        )
        messages.append(made.choices[0].message.model_dump(exclude_none=True))
        learned = learned and bool((made.model_extra or {})["penstock"]["learned"])
        amount = true_reward(messages[-1]["content"])
        body = {"conversation_id": name, "reward": amount, "turn": turn, "final": turn == 1}
        client.post("/rewards", body=body, cast_to=object)
    return learned


@pytest.mark.promise("unmodified-client-openai-s")
def test_a_run_is_learned_from_an_agent_that_changed_its_base_url(
    training: Training, short_folder: Path, tmp_path: Path
) -> None:
    socket = short_folder / "text.sock"
    with gateway(socket, tmp_path) as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S)
        training.until(lambda: socket.exists())
        learned = 0
        for number in count():
            if training.process.poll() is not None:
                break
            try:
                learned += converse(client, number)
            except openai.APIError:
                if not training.ends_within(PATIENCE_S):
                    raise
    summary = training.completed()
    assert learned > 10
    assert summary["env_steps"] >= STEPS
    assert summary["policy_version"] > 1
    assert not any(one["role"] == "actor" for one in summary["processes"])
    training.audited()
