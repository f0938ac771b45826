"""What a run of language models needs: a model, a reward model, prompts, a broker, the learner's side."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.workloads.rlhf.sentiment import NEUTRAL
from tests.support.language.scripted_language_learner import ScriptedLanguageLearner
from tests.support.language.tiny_reward import make_base, make_reward_model
from tests.support.run.broker_process import BrokerProcess, eventually, launch


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model."""
    return make_base(tmp_path_factory.mktemp("language") / "base", steps=5)


@pytest.fixture(scope="session")
def reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model on it."""
    folder = tmp_path_factory.mktemp("language") / "reward"
    make_reward_model(base, folder)
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one and of two words."""
    file = tmp_path_factory.mktemp("language") / "prompts.jsonl"
    words = [*NEUTRAL, *(f"{first} {second}" for first in NEUTRAL[:4] for second in NEUTRAL[:4])]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    return file


@pytest.fixture
def broker(redis_url: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that is ready."""
    process = launch(redis_url, tmp_path)
    eventually(process.is_ready, "readiness of the broker")
    yield process
    process.end()


@pytest.fixture
def begin(redis_url: str, base: Path) -> Iterator[Callable[..., ScriptedLanguageLearner]]:
    """Opens a run and publishes its first adapter."""
    learners: list[ScriptedLanguageLearner] = []

    def make(**kwargs: Any) -> ScriptedLanguageLearner:
        learner = ScriptedLanguageLearner(redis_url, base, **kwargs)
        learners.append(learner)
        learner.publish()
        return learner

    yield make
    for learner in learners:
        learner.log.close()
