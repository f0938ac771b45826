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
from peft import LoraConfig, get_peft_model
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
from tests.support.language.known_sentiment import (
    KnownSentiment,
    expected_pair_accuracy,
    optimal,
    optimum,
)
from tests.support.language.known_sentiment import pairs as pairs_of
from tests.support.language.tiny_models import make_base, make_reward_model
from tests.support.storage.postgresql_server import with_registry

# ---- Feedback out of a registry or a file, as lines that are feedback again.


def test_what_a_registry_has_of_a_policy_becomes_a_file(tmp_path: Path) -> None:
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


def test_a_row_that_is_none_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "a", "score": 1}\n{"prompt"\n{"prompt": "b", "score": NaN}\n')
    assert export(str(file), None, None) == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [{"prompt": "a", "score": 1}]
    assert "bad row: f.jsonl line 2: no JSON" in said.err
    assert "bad row: f.jsonl line 3: " in said.err


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="is the file that is read"):
        export(str(file), file, None)
    with pytest.raises(ConfigurationError, match="no such file"):
        export(str(tmp_path / "none.jsonl"), tmp_path / "out.jsonl", None)
    assert [one.name for one in tmp_path.iterdir()] == ["f.jsonl"]


# ---- `penstock rlhf reward`: from a file to a model to scores, and what it answers to mistakes and to
# Ctrl-C.


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
    """Scores of the same file by what was trained."""
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


def test_from_feedback_to_scores(
    place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert 0 == commands.train_model(Lifecycle("reward"), to_train(place))
    results = json.loads(capsys.readouterr().out)
    assert 1 == results["feedback"]["bad_rows"]
    assert "bad row: feedback.jsonl line 41: no response" in caplog.text
    assert {"step": "16/16"}.items() <= caplog.records[-1].__dict__.items()

    assert 0 == commands.score(**to_score(place, output=place / "scored.jsonl"))
    lines = [json.loads(line) for line in (place / "scored.jsonl").read_text().splitlines()]
    assert [f"feedback.jsonl line {number}" for number in range(1, 41)] == [line["where"] for line in lines]
    assert {results["sha256"]} == {line["sha256"] for line in lines}
    assert all(isinstance(line["reward"], float) for line in lines)
    assert "bad row: feedback.jsonl line 41: " in capsys.readouterr().err


def test_the_summary_in_words(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = to_train(place, out=tmp_path / "out", assignments=(*SETTINGS, "epochs=1"), as_json=False)
    assert 0 == commands.train_model(Lifecycle("reward"), request)
    said = capsys.readouterr().out
    for words in (
        "8 steps in",
        "trained on 32 scores and 0 pairs",
        "1 bad rows",
        "validation: scored 8  mse",
    ):
        assert words in said


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(place: Path) -> None:
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
def test_a_mistake_is_told_before_anything_is_written(
    place: Path, tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        commands.train_model(Lifecycle("reward"), to_train(place, out=tmp_path / "x", **said))
    assert not (tmp_path / "x").exists()


def test_a_file_without_a_row_to_score_is_an_error(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"prompt": "tree"}\n')
    function = "tests.unit.workloads.test_rlhf_commands:of_length"
    with pytest.raises(ConfigurationError, match="no row can be scored"):
        commands.score(**to_score(place, place=function, file=str(tmp_path / "empty.jsonl")))
    with pytest.raises(ConfigurationError, match="name a reward model's folder"):
        commands.score(**to_score(place, place="nonsense"))


def of_length(_prompts: list[Any], responses: list[str]) -> list[float | None]:
    """A reward for long responses only."""
    return [0.0 if len(response) > 20 else None for response in responses]


def test_a_reward_that_is_not_given_is_null(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = "tests.unit.workloads.test_rlhf_commands:of_length"
    assert 0 == commands.score(**to_score(place, place=function))
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert {0.0, None} == set(rewards)


def of_some(_prompts: list[Any], responses: list[str]) -> list[float | None]:
    """A reward until the text comes at which it fails."""
    if "fails" in responses:
        raise ValueError("no more")
    return [1.0 for _ in responses]


def test_scores_that_fail_in_the_middle_leave_the_output_as_it_was(place: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}] * (2 * commands.PAGE) + [{"prompt": "a", "response": "fails"}]
    file, output = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output.write_text("somebody's\n")
    function = "tests.unit.workloads.test_rlhf_commands:of_some"
    asked = to_score(place, place=function, file=str(file), output=output)
    with pytest.raises(ValueError, match="no more"):
        commands.score(**asked)
    assert output.read_text() == "somebody's\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rows.jsonl", "scored.jsonl"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert commands.score(**asked) == 0
    assert len(output.read_text().splitlines()) == 2 * commands.PAGE


# ---- What a training from feedback leaves for others: models that need nothing of its folder.


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


# ---- A preparation in short: a few steps of the training itself, and what they say of all of it.


REHEARSAL_FEEDBACK = (
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
    feedback.write_text(REHEARSAL_FEEDBACK * 40)
    kwargs = {"epochs": 5, "batch": 4, "rank": 2, "max_tokens": 32, "validation_share": 0}
    rehearse(
        settings_of(model=str(base), feedback=str(feedback), reward_training=kwargs), tmp_path, rehearsing()
    )
    results = json.loads((tmp_path / "reward_model/training_results.json").read_text())
    assert results["steps"] == LEAST_STEPS


def test_a_reward_that_is_named_needs_no_rehearsal(base: Path, tmp_path: Path) -> None:
    reward, prompts = tmp_path / "reward", tmp_path / "prompts.jsonl"
    make_reward_model(base, reward)
    prompts.write_text(REHEARSAL_FEEDBACK)
    found = rehearse(
        settings_of(model=str(base), prompts=str(prompts), reward=str(reward)), tmp_path, rehearsing()
    )
    assert found.more_seconds == 0
    assert language(found.settings.environment).reward == str(reward)


def test_ctrl_c_ends_it(base: Path, tmp_path: Path) -> None:
    feedback = tmp_path / "feedback.jsonl"
    feedback.write_text(REHEARSAL_FEEDBACK * 40)
    kwargs = {"epochs": 5, "batch": 16, "rank": 2, "max_tokens": 32, "validation_share": 0}
    asked = settings_of(model=str(base), feedback=str(feedback), reward_training=kwargs)
    with pytest.raises(Interrupted):
        rehearse(asked, tmp_path, rehearsing(stopped=True))


# ---- What the task says of itself, against simulation and brute force.


TASK = KnownSentiment()


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("", 0.0),
        ("tree", 0.0),
        ("good", 1.0),
        ("bad bad", -1.0),
        ("good bad tree stone", 0.0),
        ("good tree", 0.5),
    ],
)
def test_the_true_reward_counts_words(response: str, reward: float) -> None:
    assert reward == true_reward(response)


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


def test_pairs_are_preferred_as_often_as_said() -> None:
    rng = np.random.default_rng(0)
    rows = list(pairs_of(TASK, rng, 4000))
    better = np.array([true_reward(row["chosen"]) for row in rows])
    worse = np.array([true_reward(row["rejected"]) for row in rows])
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


def test_a_looser_leash_is_used() -> None:
    found = [optimum(TASK.rewards(), beta) for beta in (0.05, 0.1, 0.5, 1.0, 5.0)]
    assert sorted(found, key=lambda one: -one.kl) == found
    assert sorted(found, key=lambda one: -one.reward) == found


def test_without_noise_everything_can_be_known() -> None:
    certain = KnownSentiment(noise=0.0)
    values, chances = certain.rewards()
    assert certain.bayes_mse() == 0
    assert certain.bayes_pair_accuracy() == pytest.approx(1 - float(chances @ chances) / 2)
    assert np.array_equal(certain.expected_score(values), values)
