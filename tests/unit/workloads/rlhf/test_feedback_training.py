"""What a training from feedback leaves for others: models that need nothing of its folder."""

import json
import shutil
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the gateway needs its extra")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from penstock.gateway.jobs.job_records import Job, Outcome
from penstock.gateway.store.tables import JobState
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.rlhf.api import RewardModel, RewardModelConfig, train_reward_model
from penstock.workloads.rlhf.policy_service import FeedbackTraining
from penstock.workloads.rlhf.preparation import FEEDBACK
from penstock.workloads.rlhf.sentiment import Sentiment


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    """The folder of a run that made its base model, and trained a reward model and a policy on it."""
    run = tmp_path / "run"
    own = run / "base_model"
    shutil.copytree(base, own)
    rows = Sentiment().scored(np.random.default_rng(0), 20)
    (tmp_path / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RewardModelConfig(model=str(own), scale="percent", settings={"epochs": 1, "rank": 2})
    train_reward_model(str(tmp_path / "feedback.jsonl"), config, run / "reward_model")
    train_policy(run, own)
    return run


def train_policy(run: Path, base: Path) -> None:
    """What a run leaves of a policy on a base model."""
    bare = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(bare, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(run / "policies" / "v9")
    manifest = {"policy": "policies/v9", "made_from": {"model": str(base)}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "training_results.json").write_text("{}")


def finished() -> Job:
    """A job whose run has finished."""
    now = datetime.now(UTC)
    return Job(
        id="a",
        project="alpha",
        agent="my_agent",
        template="rlhf",
        numbers={},
        facts={"feedbackCount": 20},
        by="test",
        state=JobState.RUNNING,
        cause="",
        place="here",
        cancelled_by=None,
        result=None,
        created=now,
        began=now,
        ended=None,
    )


def test_what_is_exported_opens_when_the_run_is_gone(run: Path, tmp_path: Path) -> None:
    samples = [Sample(prompt="the film", response="good")]
    scored = RewardModel.load(run / "reward_model").score(samples).values
    outcome = Outcome(state=JobState.FINISHED, summary={"updates": 1})
    made = FeedbackTraining().conclude(finished(), outcome, (), folder=tmp_path, models=tmp_path / "models")
    shutil.rmtree(run)
    assert made.version is not None
    assert AutoModelForCausalLM.from_pretrained(made.version.model_path).num_parameters() > 0
    assert RewardModel.load(Path(made.version.reward_model_path)).score(samples).values == scored


def test_what_cannot_be_copied_whole_leaves_nothing(run: Path, tmp_path: Path) -> None:
    outcome, models = Outcome(state=JobState.FINISHED, summary={"updates": 1}), tmp_path / "models"
    gone = run / "reward_model" / "gone.json"
    gone.symlink_to(tmp_path / "nowhere")
    kind = FeedbackTraining()
    with pytest.raises(OSError, match="gone.json"):
        kind.conclude(finished(), outcome, (), folder=tmp_path, models=models)
    assert list((models / "alpha" / "my_agent").iterdir()) == []
    gone.unlink()
    assert kind.conclude(finished(), outcome, (), folder=tmp_path, models=models).version is not None
    assert [one.name for one in (models / "alpha" / "my_agent").iterdir()] == ["v20"]


def test_a_reward_model_that_is_used_again_goes_along(run: Path, tmp_path: Path) -> None:
    kind, outcome = FeedbackTraining(), Outcome(state=JobState.FINISHED, summary={"updates": 1})
    models, again = tmp_path / "models", tmp_path / "again"
    first = kind.conclude(finished(), outcome, (), folder=tmp_path, models=models).version
    assert first is not None
    samples = [Sample(prompt="the film", response="good")]
    scored = RewardModel.load(Path(first.reward_model_path)).score(samples).values
    again.mkdir()
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.sqlite", migrate=True)
    facts = {"through": 0, "rewardModel": first.version, "rewardModelPath": first.reward_model_path}
    for _ in range(2):  # a gateway that was killed prepares a job again
        said = kind.prepare(registry, "alpha/my_agent", facts, again)["environment"]["kwargs"]
    assert (said["reward"], said["model"]) == (str(again / "reward_model"), str(again / "base_model"))
    shutil.rmtree(Path(first.model_path).parent)
    assert RewardModel.load(Path(said["reward"])).score(samples).values == scored
    train_policy(again / "run", Path(said["model"]))
    second = kind.conclude(finished(), outcome, (first.version,), folder=again, models=models).version
    shutil.rmtree(again)
    assert second is not None
    assert second.version == "v20.2"
    assert RewardModel.load(Path(second.reward_model_path)).score(samples).values == scored
    assert AutoModelForCausalLM.from_pretrained(second.model_path).num_parameters() > 0


def test_a_training_that_asks_for_none_makes_its_reward_model(tmp_path: Path) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.sqlite", migrate=True)
    facts = {"through": 0, "rewardModel": None, "rewardModelPath": None}
    said = FeedbackTraining().prepare(registry, "alpha/my_agent", facts, tmp_path)["environment"]["kwargs"]
    assert said.keys() == {"feedback", "feedback_scale"}


def test_feedback_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.sqlite", migrate=True)
    length, count = 200_000, 100
    for number in range(count):
        text = f"{number}".ljust(length)
        registry.add_ratings("alpha/my_agent", [Rating(prompt=text, response=text, score=0.5)])
    kind = FeedbackTraining()
    tracemalloc.start()
    try:
        facts = kind.facts(registry, "alpha/my_agent")
        kind.prepare(registry, "alpha/my_agent", facts, tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        registry.close()
    assert facts["feedbackCount"] == len((tmp_path / FEEDBACK).read_text().splitlines()) == count
    assert most < length * count
