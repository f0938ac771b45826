"""What a run needs is made once, named in its settings, and kept."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError, Progress, Settings
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.rlhf import preparation
from penstock.workloads.rlhf.environment import language
from penstock.workloads.rlhf.preparation import prepare, services
from tests.support.language.tiny_reward import make_reward_model

FAST = {"epochs": 0.1, "batch": 64, "rank": 2, "max_tokens": 32}


def settings_of(**kwargs: Any) -> Settings:
    """Of a run of language models."""
    return configuration.load([{"workload": "rlhf", "environment": {"id": "words", "kwargs": kwargs}}])


def progress() -> tuple[Progress, list[str]]:
    """A progress that is never stopped, and what it was told."""
    said: list[str] = []
    return Progress(said.append, threading.Event()), said


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little of everything."""
    for name, value in (("_TEXTS", 64), ("_STEPS", 2), ("_OPINIONS", 80)):
        monkeypatch.setattr(preparation, name, value)


@pytest.mark.usefixtures("quick")
def test_the_built_in_task_is_made_from_nothing_and_kept(tmp_path: Path) -> None:
    told, said = progress()
    made = prepare(settings_of(task="sentiment", reward_training=FAST), tmp_path, told)
    section = language(made.environment)
    assert section.model == str(tmp_path / "base_model") == made.policy.kwargs["model"]
    assert section.prompts == section.feedback == str(tmp_path / "feedback.jsonl")
    assert section.reward == str(tmp_path / "reward_model")
    assert section.true_reward == "penstock.workloads.rlhf.sentiment:true_rewards"
    assert len(Path(section.feedback).read_text().splitlines()) == 80
    results = json.loads((tmp_path / "reward_model" / "training_results.json").read_text())
    assert results["settings"]["rank"] == 2
    assert results["scale"] == "percent"
    assert len(said) == 4
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert prepare(made, tmp_path, told) == made
    assert len(said) == 4
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}


@pytest.mark.usefixtures("quick")
def test_a_preparation_that_is_stopped_is_gone_on_with(tmp_path: Path) -> None:
    asked = settings_of(task="sentiment", reward_training={**FAST, "epochs": 2})
    stopped, _ = progress()
    stopped.stop.set()
    with pytest.raises(Interrupted):
        prepare(asked, tmp_path, stopped)
    assert not (tmp_path / "base_model").exists()

    stop = threading.Event()
    with pytest.raises(Interrupted):
        prepare(asked, tmp_path, Progress(lambda text: stop.set() if "reward model" in text else None, stop))
    assert (tmp_path / "base_model").is_dir()
    assert not (tmp_path / "reward_model" / "reward.json").exists()

    again, said = progress()
    prepare(asked, tmp_path, again)
    assert (tmp_path / "reward_model" / "reward.json").exists()
    assert len(said) == 2


@pytest.mark.usefixtures("quick")
def test_bad_rows_of_feedback_are_shown_and_left_out(tmp_path: Path) -> None:
    first = prepare(settings_of(task="sentiment", reward_training=FAST), tmp_path, progress()[0])
    made = language(first.environment)
    feedback = tmp_path / "mine.jsonl"
    rows = Path(made.feedback).read_text().splitlines()
    feedback.write_text("\n".join([*rows[:40], '{"prompt": "no opinion"}', *rows[40:]]) + "\n")
    told, said = progress()
    asked = settings_of(
        model=made.model, feedback=str(feedback), feedback_scale="percent", reward_training=FAST
    )
    prepare(asked, tmp_path / "run", told)
    shown = next(text for text in said if "bad rows" in text).splitlines()
    assert shown[0] == f"1 bad rows of {feedback}:"
    assert "line 41" in shown[1]


@pytest.mark.parametrize("named", ["other", "gpt2"])
def test_two_base_models_are_refused_by_name(base: Path, tmp_path: Path, named: str) -> None:
    (tmp_path / "other").mkdir()
    asked = settings_of(model=str(base), reward="grpc://127.0.0.1:1", prompts="prompts.jsonl")

    def with_policy(model: str) -> Settings:
        section = asked.policy.model_copy(update={"kwargs": {"model": model}})
        return asked.model_copy(update={"policy": section})

    place = str(tmp_path / named) if named == "other" else named
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.model=.*names another base model"):
        prepare(with_policy(place), tmp_path / "run", progress()[0])
    made = prepare(with_policy(str(base)), tmp_path / "run", progress()[0])
    assert made.policy.kwargs["model"] == str(base)


@pytest.mark.usefixtures("quick")
def test_a_model_of_words_knows_those_of_pairs(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"question {number}", "chosen": f"better {number}", "rejected": f"worse {number}"}
        for number in range(12)
    ]
    rows += [{"prompt": "question alone", "response": "scored", "score": 0.5}, {"chosen": "prompt absent"}]
    talk = [{"role": "user", "content": "spoken words"}]
    rows += [{"prompt": talk, "response": "scored", "score": 0.5}]
    feedback = tmp_path / "pairs.jsonl"
    feedback.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = settings_of(
        task="words", feedback=str(feedback), feedback_scale="0:1", reward_training={**FAST, "epochs": 1}
    )
    made = language(prepare(asked, tmp_path / "run", progress()[0]).environment)
    words = json.loads((Path(made.model) / "tokenizer.json").read_text())["model"]["vocab"]
    assert {"question", "better", "worse", "scored", "spoken"} <= words.keys()
    assert not {"absent", "[{'role':"} & words.keys()
    tokenizer = load_tokenizer(made.model)
    asked_for = ChatEncoder(tokenizer).begin([Message("user", "question alone")])
    assert asked_for == tokenizer("question alone")["input_ids"]  # as the prompt that it was trained on
    results = json.loads((tmp_path / "run" / "reward_model" / "training_results.json").read_text())
    assert results["feedback"]["bad_rows"] == 1


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, r"environment\.kwargs\.model='': name the folder"),
        ({"model": "m"}, r"environment\.kwargs\.prompts='': name prompts, or feedback"),
        ({"model": "m", "prompts": "p"}, r"environment\.kwargs\.reward='': name who rewards, or feedback"),
        (
            {"model": "m", "prompts": "p", "reward": "grpc://x:1", "serve_reward": True},
            r"environment\.kwargs\.reward='grpc://x:1': serve_reward serves a reward model's folder",
        ),
        (
            {"model": "m", "feedback": "f", "feedback_scale": "inches"},
            r"environment\.kwargs\.feedback_scale='inches': use thumbs",
        ),
        (
            {"model": "m", "feedback": "f", "reward_training": {"ranc": 3}},
            r"environment\.kwargs\.reward_training\.ranc",
        ),
    ],
)
def test_what_cannot_be_prepared_is_named(tmp_path: Path, kwargs: dict[str, Any], said: str) -> None:
    told, _ = progress()
    with pytest.raises(ConfigurationError, match=said):
        prepare(settings_of(**kwargs), tmp_path, told)
    assert not list(tmp_path.iterdir())


def test_the_reward_model_is_served_where_that_is_asked_for(base: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    make_reward_model(base, reward)
    asked = settings_of(model=str(base), prompts="p", reward=str(reward), serve_reward=True)
    made = services(asked, Path("/run/x"))
    assert made.places == {"reward": "unix:/run/x/reward.sock"}
    listening = ("--listen", "unix:/run/x/reward.sock", "--device", "cpu")
    assert made.commands == {"reward": ("rlhf", "reward", "serve", str(reward), *listening)}
    assert not services(settings_of(model=str(base), reward=str(reward)), tmp_path).commands


@pytest.mark.parametrize("name", ["guard_rules", "guard_classifier"])
def test_a_file_of_the_guard_that_cannot_be_used_is_refused_before_anything_is_made(
    tmp_path: Path, name: str
) -> None:
    asked = settings_of(task="sentiment", **{name: "nowhere.toml"})
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{name}='nowhere\.toml': "):
        prepare(asked, tmp_path, progress()[0])
    assert not any(tmp_path.iterdir())
