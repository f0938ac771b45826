"""A preparation in short: a few steps of the training itself, and what they say of all of it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.config import settings as configuration
from penstock.config.settings import Progress, Settings
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.reward.reward_model import CARD
from penstock.workloads.rlhf import preparation
from penstock.workloads.rlhf import preparation as rehearsal
from penstock.workloads.rlhf.environment import language
from penstock.workloads.rlhf.preparation import LEAST_STEPS, STEPS, missing_seconds, rehearse
from tests.support.language.tiny_reward import make_reward_model

FEEDBACK = (
    '{"prompt": "apple", "response": "good river", "score": 0.5}\n{"prompt": "bird", "response": "bad", '
    '"score": -0.5}\n'
)


def settings_of(**kwargs: Any) -> Settings:
    """Of a run of language models."""
    return configuration.load([{"workload": "rlhf", "environment": {"id": "words", "kwargs": kwargs}}])


def rehearsing(*, stopped: bool = False) -> Progress:
    """A progress that reports nothing."""
    stop = threading.Event()
    if stopped:
        stop.set()
    return Progress(lambda _: None, stop)


def test_missing_steps_take_as_long_as_those_behind_the_warm_up() -> None:
    assert missing_seconds([9.0, 9.0, *(1.0,) * 5, *(3.0,) * 5], 100) == pytest.approx(88 * 2.0)
    assert missing_seconds([9.0, 1.0], 12) == pytest.approx(10 * 5.0)
    assert missing_seconds([9.0, 9.0], 2) == 0


def test_a_rehearsal_makes_a_reward_model_that_can_be_run_with(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_OPINIONS", 200)
    kwargs = {"epochs": 5, "batch": 16, "rank": 2, "max_tokens": 32}
    asked = settings_of(task="sentiment", model=str(base), reward_training=kwargs)
    found = rehearse(asked, tmp_path, rehearsing())
    section = language(found.settings.environment)
    assert section.reward == str(tmp_path / "reward_model")
    assert (tmp_path / "reward_model" / CARD).exists()
    results = json.loads((tmp_path / "reward_model/training_results.json").read_text())
    assert LEAST_STEPS < results["steps"] <= STEPS
    assert found.more_seconds > 0
    assert found.scores["feedback"].count == 200
    mean, std = found.scores["feedback"].mean, found.scores["feedback"].std
    assert mean is not None
    assert std is not None
    assert -0.3 < mean < 0.3
    assert 0.2 < std < 0.7


def test_slow_steps_are_made_a_few_times(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "WITHIN_S", 0.0)
    feedback = tmp_path / "feedback.jsonl"
    feedback.write_text(FEEDBACK * 40)
    kwargs = {"epochs": 5, "batch": 4, "rank": 2, "max_tokens": 32, "validation_share": 0}
    rehearse(
        settings_of(model=str(base), feedback=str(feedback), reward_training=kwargs), tmp_path, rehearsing()
    )
    results = json.loads((tmp_path / "reward_model/training_results.json").read_text())
    assert results["steps"] == LEAST_STEPS


def test_a_reward_that_is_named_needs_no_rehearsal(base: Path, tmp_path: Path) -> None:
    reward, prompts = tmp_path / "reward", tmp_path / "prompts.jsonl"
    make_reward_model(base, reward)
    prompts.write_text(FEEDBACK)
    found = rehearse(
        settings_of(model=str(base), prompts=str(prompts), reward=str(reward)), tmp_path, rehearsing()
    )
    assert found.more_seconds == 0
    assert language(found.settings.environment).reward == str(reward)


def test_ctrl_c_ends_it(base: Path, tmp_path: Path) -> None:
    feedback = tmp_path / "feedback.jsonl"
    feedback.write_text(FEEDBACK * 40)
    kwargs = {"epochs": 5, "batch": 16, "rank": 2, "max_tokens": 32, "validation_share": 0}
    asked = settings_of(model=str(base), feedback=str(feedback), reward_training=kwargs)
    with pytest.raises(Interrupted):
        rehearse(asked, tmp_path, rehearsing(stopped=True))
