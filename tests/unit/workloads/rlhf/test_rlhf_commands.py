import ast
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from penstock.config import settings as configuration
from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Progress, Settings
from penstock.gateway.jobs.job_records import Job, Outcome
from penstock.gateway.store.tables import JobState
from penstock.launch.run.supervisor import penstock
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback import rows_of
from penstock.workloads.language.reward.reward_model import CARD
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.rlhf import commands, preparation, sentiment
from penstock.workloads.rlhf import preparation as rehearsal
from penstock.workloads.rlhf.api import RewardModel, RewardModelConfig, train_reward_model
from penstock.workloads.rlhf.commands import export
from penstock.workloads.rlhf.environment import language
from penstock.workloads.rlhf.policy_service import FeedbackTraining
from penstock.workloads.rlhf.preparation import FEEDBACK, LEAST_STEPS, STEPS, missing_seconds, rehearse
from penstock.workloads.rlhf.sentiment import Sentiment, true_reward
from tests.support.language.known_sentiment import KnownSentiment, expected_pair_accuracy, optimal, optimum
from tests.support.language.known_sentiment import pairs as pairs_of
from tests.support.language.tiny_models import make_base, make_reward_model
from tests.support.storage.postgresql_server import with_registry


def test_ratings_of_a_registry_are_exported_to_a_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/r.sqlite"
    turns = [{"role": "user", "content": "2 + 2?"}]
    with Registry.open(with_registry(url), migrate=True) as registry:
        registry.add_ratings(
            "alpha/my_agent",
            [
                Rating(prompt="ä", response="4", score=0.5, rater="r"),
                Rating(prompt=turns, response="4", rejected="5", key="safe"),
            ],
        )
        registry.add_ratings("alpha/other", [Rating(prompt="b", response="no", score=0.1)])
    assert export(url, tmp_path / "f.jsonl", "alpha/my_agent") == 0
    written = [row for _, row in rows_of(str(tmp_path / "f.jsonl"))]
    assert written == [row for _, row in rows_of(url, "alpha/my_agent")]
    assert [row["prompt"] for row in written] == ["ä", turns]


def test_an_invalid_row_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "a", "score": 1}\n{"prompt"\n{"prompt": "b", "score": NaN}\n')
    assert export(str(file), None, None) == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [{"prompt": "a", "score": 1}]
    assert "bad row: f.jsonl line 2: no JSON" in said.err
    assert "bad row: f.jsonl line 3: " in said.err
    with pytest.raises(ConfigurationError, match="is the file that is read"):
        export(str(file), file, None)
    with pytest.raises(ConfigurationError, match="no such file"):
        export(str(tmp_path / "none.jsonl"), tmp_path / "out.jsonl", None)
    assert [one.name for one in tmp_path.iterdir()] == ["f.jsonl"]


PATIENCE_S = 120
SETTINGS = ("rank=4", "batch=4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and a file of feedback, in which one row is bad."""
    folder = tmp_path_factory.mktemp("reward")
    make_base(folder / "base", steps=1)
    rows = [*Sentiment().scored(np.random.default_rng(0), 40), {"prompt": "tree"}]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def to_train(place: Path, **said: Any) -> commands.TrainingOptions:
    """A short training, otherwise as the command's defaults."""
    known: dict[str, Any] = {
        "feedback": str(place / "feedback.jsonl"),
        "model": str(place / "base"),
        "out": place / "out",
        "scale": "percent",
        "key": None,
        "part": None,
        "columns": (),
        "heads": (),
        "weights": (),
        "reference": None,
        "resume": False,
        "device": "cpu",
        "assignments": SETTINGS,
        "as_json": True,
    }
    return commands.TrainingOptions(**(known | said))


def to_score(folder: Path, **said: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "place": str(folder / "out"),
        "file": str(folder / "feedback.jsonl"),
        "output": None,
        "part": None,
        "columns": (),
        "base": None,
        "device": "cpu",
        "config": None,
        "assignments": (),
    }
    return known | said


def test_a_reward_model_trained_from_feedback_scores_responses(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert commands.train_model(Lifecycle("reward"), to_train(place)) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["feedback"]["bad_rows"] == 1
    assert "bad row: feedback.jsonl line 41: no response" in caplog.text
    assert {"step": "16/16"}.items() <= caplog.records[-1].__dict__.items()

    assert commands.score(**to_score(place, output=place / "scored.jsonl")) == 0
    lines = [json.loads(line) for line in (place / "scored.jsonl").read_text().splitlines()]
    assert [f"feedback.jsonl line {number}" for number in range(1, 41)] == [line["where"] for line in lines]
    assert {results["sha256"]} == {line["sha256"] for line in lines}
    assert all(isinstance(line["reward"], float) for line in lines)
    assert "bad row: feedback.jsonl line 41: " in capsys.readouterr().err

    request = to_train(place, out=tmp_path / "out", assignments=(*SETTINGS, "epochs=1"), as_json=False)
    assert commands.train_model(Lifecycle("reward"), request) == 0
    said = capsys.readouterr().out
    for words in ("8 steps in", "trained on 32 scores and 0 pairs", "1 bad rows", ": scored 8  mse"):
        assert words in said


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_to_continue_from(place: Path) -> None:
    words = ["train", "feedback.jsonl", "--model", "base", "--scale", "percent", "--out", "parted"]
    process = subprocess.Popen(
        penstock("rlhf", "reward", *words, "--set", "batch=4", "--set", "epochs=500"),
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "validated step=" in line:
            process.send_signal(signal.SIGINT)
            break
    said.append(process.stderr.read())
    assert 130 == process.wait(PATIENCE_S), "".join(said)
    assert "interrupted: go on with --resume" in said[-1]
    assert not (place / "parted" / "reward.json").exists()
    assert list((place / "parted" / "checkpoints").iterdir())
    with pytest.raises(ConfigurationError, match="go on with --resume"):
        commands.train_model(Lifecycle("reward"), to_train(place, out=place / "parted"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"scale": "starz"}, "--scale='starz': use thumbs, stars"),
        ({"assignments": ("rnak=4",)}, "rnak=4: Extra inputs"),
        ({"columns": ("score",)}, "write OURS=THEIRS"),
        ({"feedback": "gone.jsonl"}, "gone.jsonl: no such file"),
        ({"model": "./gone"}, "model='./gone': there is no such folder"),
        ({"resume": True}, "holds no checkpoint"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_written(
    place: Path, tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        commands.train_model(Lifecycle("reward"), to_train(place, out=tmp_path / "x", **said))
    assert not (tmp_path / "x").exists()


OF_LENGTH = f"{__name__}:of_length"


def of_length(_prompts: list[Any], responses: list[str]) -> list[float | None]:
    """A reward for long responses only, until a text comes at which it fails."""
    if "fails" in responses:
        raise ValueError("no more")
    return [0.0 if len(response) > 20 else None for response in responses]


def test_a_reward_that_is_not_given_is_null_and_no_row_is_an_error(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.score(**to_score(place, place=OF_LENGTH)) == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert set(rewards) == {0.0, None}
    (tmp_path / "empty.jsonl").write_text('{"prompt": "tree"}\n')
    with pytest.raises(ConfigurationError, match="no row can be scored"):
        commands.score(**to_score(place, place=OF_LENGTH, file=str(tmp_path / "empty.jsonl")))
    with pytest.raises(ConfigurationError, match="name a reward model's folder"):
        commands.score(**to_score(place, place="nonsense"))


def test_a_failure_while_scoring_leaves_the_output_unchanged(place: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}] * (2 * commands.PAGE) + [{"prompt": "a", "response": "fails"}]
    file, output = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output.write_text("somebody's\n")
    asked = to_score(place, place=OF_LENGTH, file=str(file), output=output)
    with pytest.raises(ValueError, match="no more"):
        commands.score(**asked)
    assert output.read_text() == "somebody's\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rows.jsonl", "scored.jsonl"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert commands.score(**asked) == 0
    assert len(output.read_text().splitlines()) == 2 * commands.PAGE


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
    bare = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(bare, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(run / "policies" / "v9")
    manifest = {"policy": "policies/v9", "made_from": {"model": str(base)}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "training_results.json").write_text("{}")


def finished() -> Job:
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


def test_an_export_opens_without_its_run_wherever_it_is_moved_to(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [Sample(prompt="the film", response="good")]
    scored = RewardModel.load(run / "reward_model").score(samples).values
    outcome = Outcome(state=JobState.FINISHED, summary={"updates": 1})
    made = FeedbackTraining().conclude(finished(), outcome, (), folder=tmp_path, models=tmp_path / "models")
    shutil.rmtree(run)
    assert made.version is not None
    assert RewardModel.load(Path(made.version.reward_model_path)).score(samples).values == scored
    moved = Path(shutil.move(Path(made.version.model_path).parent, tmp_path / "elsewhere"))
    assert RewardModel.load(moved / "reward_model").score(samples).values == scored
    assert str(tmp_path) not in "".join(file.read_text() for file in moved.rglob("adapter_config.json"))
    monkeypatch.chdir(moved)
    assert AutoPeftModelForCausalLM.from_pretrained("policy").num_parameters() > 0
    assert AutoModelForCausalLM.from_pretrained("policy").num_parameters() > 0


def test_an_incomplete_copy_leaves_nothing(run: Path, tmp_path: Path) -> None:
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


def test_a_reused_reward_model_is_exported_with_the_policy(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, outcome = FeedbackTraining(), Outcome(state=JobState.FINISHED, summary={"updates": 1})
    models, again = tmp_path / "models", tmp_path / "again"
    first = kind.conclude(finished(), outcome, (), folder=tmp_path, models=models).version
    assert first is not None
    samples = [Sample(prompt="the film", response="good")]
    scored = RewardModel.load(Path(first.reward_model_path)).score(samples).values
    again.mkdir()
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.sqlite", migrate=True)
    facts: dict[str, Any] = {"through": 0, "rewardModel": None, "rewardModelPath": None}
    said = kind.prepare(registry, "alpha/my_agent", facts, again)["environment"]["kwargs"]
    assert said.keys() == {"feedback", "feedback_scale"}, "it makes its own where it asks for none"
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
    monkeypatch.chdir(Path(second.model_path).parent)
    assert AutoModelForCausalLM.from_pretrained(second.model_path).num_parameters() > 0


def test_feedback_is_never_all_in_memory(tmp_path: Path) -> None:
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


REHEARSAL_FEEDBACK = (
    '{"prompt": "apple", "response": "good river", "score": 0.5}\n{"prompt": "bird", "response": "bad", '
    '"score": -0.5}\n'
)


def settings_of(**kwargs: Any) -> Settings:
    return configuration.load([{"workload": "rlhf", "environment": {"id": "words", "kwargs": kwargs}}])


def rehearsing(*, stopped: bool = False) -> Progress:
    stop = threading.Event()
    if stopped:
        stop.set()
    return Progress(lambda _: None, stop)


def test_missing_steps_are_assumed_to_take_as_long_as_those_after_warm_up() -> None:
    assert missing_seconds([9.0, 9.0, *(1.0,) * 5, *(3.0,) * 5], 100) == pytest.approx(88 * 2.0)
    assert missing_seconds([9.0, 1.0], 12) == pytest.approx(10 * 5.0)
    assert missing_seconds([9.0, 9.0], 2) == 0


def test_a_dry_run_makes_a_usable_reward_model(
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
    assert found.scores["feedback"].mean == pytest.approx(0, abs=0.3)
    assert found.scores["feedback"].std == pytest.approx(0.45, abs=0.25)


def test_slow_steps_are_made_a_few_times_and_ctrl_c_ends_them(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "WITHIN_S", 0.0)
    feedback = tmp_path / "feedback.jsonl"
    feedback.write_text(REHEARSAL_FEEDBACK * 40)
    kwargs = {"epochs": 5, "batch": 4, "rank": 2, "max_tokens": 32, "validation_share": 0}
    asked = settings_of(model=str(base), feedback=str(feedback), reward_training=kwargs)
    (tmp_path / "stopped").mkdir()
    with pytest.raises(Interrupted):
        rehearse(asked, tmp_path / "stopped", rehearsing(stopped=True))
    rehearse(asked, tmp_path, rehearsing())
    results = json.loads((tmp_path / "reward_model/training_results.json").read_text())
    assert results["steps"] == LEAST_STEPS


def test_a_named_reward_model_needs_no_dry_run_of_one(base: Path, tmp_path: Path) -> None:
    reward, prompts = tmp_path / "reward", tmp_path / "prompts.jsonl"
    make_reward_model(base, reward)
    prompts.write_text(REHEARSAL_FEEDBACK)
    found = rehearse(
        settings_of(model=str(base), prompts=str(prompts), reward=str(reward)), tmp_path, rehearsing()
    )
    assert found.more_seconds == 0
    assert language(found.settings.environment).reward == str(reward)


TASK = KnownSentiment()


def test_the_true_reward_counts_words() -> None:
    known = {"": 0, "tree": 0, "good": 1, "bad bad": -1, "good bad tree stone": 0, "good tree": 0.5}
    assert {response: true_reward(response) for response in known} == known


def test_the_file_imports_nothing_that_learns() -> None:
    tree = ast.parse(Path(sentiment.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} == {"collections", "dataclasses", "typing", "numpy"}


def test_the_distribution_of_rewards_is_that_of_the_generator() -> None:
    rng, count = np.random.default_rng(0), 10_000
    drawn = np.array([true_reward(TASK.response(rng)) for _ in range(count)])
    values, chances = TASK.rewards()
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert set(drawn) <= set(values)
    shares = np.array([(drawn == value).mean() for value in values])
    assert np.all(np.abs(shares - chances) <= 5 * np.sqrt(chances * (1 - chances) / count) + 1e-12)


def test_the_floor_of_the_squared_error_is_that_of_the_best_prediction() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.choice(TASK.rewards().values, 400_000, p=TASK.rewards().chances)
    said = np.clip(rewards + TASK.noise * rng.standard_normal(len(rewards)), -1, 1)
    best = TASK.expected_score(rewards)
    assert np.mean((said - best) ** 2) == pytest.approx(TASK.bayes_mse(), rel=0.01)
    assert np.mean((said - rewards) ** 2) > np.mean((said - best) ** 2)


def test_the_ceiling_of_pair_accuracy_is_that_of_the_true_order() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.choice(TASK.rewards().values, (2, 400_000), p=TASK.rewards().chances)
    said = rewards + TASK.noise * rng.standard_normal(rewards.shape)
    agree = (np.sign(rewards[0] - rewards[1]) * np.sign(said[0] - said[1]) + 1) / 2
    assert agree.mean() == pytest.approx(TASK.bayes_pair_accuracy(), abs=0.003)
    rows = list(pairs_of(TASK, np.random.default_rng(0), 4000))
    better, worse = (np.array([true_reward(row[side]) for row in rows]) for side in ("chosen", "rejected"))
    accuracy = ((np.sign(better - worse) + 1) / 2).mean()
    assert accuracy == pytest.approx(TASK.bayes_pair_accuracy(), abs=0.025)


def test_the_true_order_reaches_the_ceiling_and_the_reversed_one_its_mirror() -> None:
    rng = np.random.default_rng(0)
    responses = [TASK.response(rng) for _ in range(50)]
    rewards = [true_reward(response) for response in responses]
    accuracy, ceiling = expected_pair_accuracy(TASK, responses, rewards)
    assert accuracy == pytest.approx(ceiling, abs=1e-12)
    reversed_, _ = expected_pair_accuracy(TASK, responses, [-reward for reward in rewards])
    assert reversed_ == pytest.approx(1 - ceiling, abs=1e-12)
    assert (0.5, ceiling) == pytest.approx(expected_pair_accuracy(TASK, responses, [0.0] * 50))


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_no_other_policy_beats_the_optimum(beta: float) -> None:
    values, chances = TASK.rewards()
    best = optimal(chances, values, beta)

    def value(policy: np.ndarray) -> float:
        return float(policy @ values - beta * policy @ np.log(policy / chances))

    found = optimum(TASK.rewards(), beta)
    assert value(best) == pytest.approx(found.value, abs=1e-12)
    assert best @ values == pytest.approx(found.reward, abs=1e-12)
    assert best @ np.log(best / chances) == pytest.approx(found.kl, abs=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * rng.standard_normal(len(best)))
        assert value(other / other.sum()) < found.value
