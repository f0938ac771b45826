"""`penstock rlhf reward`: from a file to a model to scores, and what it answers to mistakes and to Ctrl-C."""

import json
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.launch.run.supervisor import penstock
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.rlhf import commands
from penstock.workloads.rlhf.sentiment import Sentiment
from tests.support.language.tiny_reward import make_base

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
    function = "tests.unit.workloads.rlhf.commands.test_reward_commands:of_length"
    with pytest.raises(ConfigurationError, match="no row can be scored"):
        commands.score(**to_score(place, place=function, file=str(tmp_path / "empty.jsonl")))
    with pytest.raises(ConfigurationError, match="name a reward model's folder"):
        commands.score(**to_score(place, place="nonsense"))


def of_length(_prompts: list[Any], responses: list[str]) -> list[float | None]:
    """A reward for long responses only."""
    return [0.0 if len(response) > 20 else None for response in responses]


def test_a_reward_that_is_not_given_is_null(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = "tests.unit.workloads.rlhf.commands.test_reward_commands:of_length"
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
    function = "tests.unit.workloads.rlhf.commands.test_reward_commands:of_some"
    asked = to_score(place, place=function, file=str(file), output=output)
    with pytest.raises(ValueError, match="no more"):
        commands.score(**asked)
    assert output.read_text() == "somebody's\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rows.jsonl", "scored.jsonl"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert commands.score(**asked) == 0
    assert len(output.read_text().splitlines()) == 2 * commands.PAGE
