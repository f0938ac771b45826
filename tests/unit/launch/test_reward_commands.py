"""`penstock reward`: from a file to a model to scores, and what it answers to mistakes and to Ctrl-C."""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from launch.process import penstock
from tests.tiny_reward import make_base
from workloads.rlhf.sentiment import Sentiment

PATIENCE_S = 120
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and a file of feedback, in which one row is bad."""
    folder = tmp_path_factory.mktemp("reward")
    make_base(folder / "base", steps=1)
    rows = [*Sentiment().scored(np.random.default_rng(0), 40), {"prompt": "tree"}]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """`penstock reward WORDS` in the folder, to its end."""
    return subprocess.run(
        penstock("reward", *words),
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def train(*more: str) -> list[str]:
    """The words of a short training."""
    return [
        "train", "feedback.jsonl", "--model", "base", "--scale", "percent",
        "--set", "rank=4", "--set", "batch=4", *more,
    ]  # fmt: skip


def test_from_feedback_to_scores(place: Path) -> None:
    """Progress and bad rows on stderr, a summary as JSON on stdout; then a reward for each row."""
    done = run(place, *train("--out", "out", "--json"))
    assert 0 == done.returncode, done.stderr
    results = json.loads(done.stdout)
    assert 1 == results["feedback"]["bad_rows"]
    assert "bad row: feedback.jsonl line 41: no response" in done.stderr
    assert "step=16/16" in done.stderr
    assert results == json.loads((place / "out" / "training_results.json").read_text())

    scored = run(place, "score", "out", "feedback.jsonl")
    assert 0 == scored.returncode, scored.stderr
    lines = [json.loads(line) for line in scored.stdout.splitlines()]
    assert [f"feedback.jsonl line {number}" for number in range(1, 41)] == [line["where"] for line in lines]
    assert {results["sha256"]} == {line["sha256"] for line in lines}
    assert all(isinstance(line["reward"], float) for line in lines)
    assert "bad row: feedback.jsonl line 41: no response" in scored.stderr


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(place: Path) -> None:
    """Exit 130, nothing that looks like a model; --resume ends what was begun."""
    words = train("--out", "parted", "--set", "epochs=200")
    process = subprocess.Popen(
        penstock("reward", *words), cwd=place, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "training step=" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert 130 == process.wait(PATIENCE_S), "".join(said) + rest
    assert "interrupted: go on with --resume" in rest
    assert not (place / "parted" / "reward.json").exists()
    checkpoints = list((place / "parted" / "checkpoints").iterdir())
    assert checkpoints

    refused = run(place, *words)
    assert 2 == refused.returncode
    assert "go on with --resume" in refused.stderr
    other = run(place, *train("--out", "parted", "--set", "epochs=3", "--resume"))
    assert 2 == other.returncode
    assert "--resume: epochs=3.0, and it was begun with 200.0" in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (train("--out", "x", "--scale", "starz"), "--scale='starz': use thumbs, stars"),
        (train("--out", "x", "--set", "rnak=4"), "rnak=4: Extra inputs"),
        (train("--out", "x", "--column", "score"), "write OURS=THEIRS"),
        (["train", "gone.jsonl", "--model", "base", "--out", "x"], "gone.jsonl: no such file"),
        (["train", "feedback.jsonl", "--model", "./gone", "--out", "x"], "model=./gone"),
        (["score", "nonsense", "feedback.jsonl"], "name a reward model's folder"),
        (["serve", "base"], "holds no reward.json"),
    ],
)
def test_a_mistake_exits_2_with_its_remedy(place: Path, words: list[str], message: str) -> None:
    """And writes nothing."""
    done = run(place, *words)
    assert 2 == done.returncode, done.stderr
    assert message in done.stderr
    assert "" == done.stdout
    assert not (place / "x").exists()
