"""`penstock train --dry-run` end to end, with real processes."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import PATIENCE_S, is_alive

TINY = (
    "CartPole-v1", "--actors", "1", "--total-steps", "4000", "--set", "learner.stop_at_target=false",
    "--set", "evaluation.episodes=4", "--set", "algorithm.batch_steps=512",
)  # fmt: skip


def said(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        penstock("train", *TINY, *arguments),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
        cwd=cwd,
    )


def test_a_run_without_an_early_end_is_predicted_from_a_short_one(tmp_path: Path) -> None:
    told = said("--dry-run", "--json", "--set", "learner.total_steps=100000000", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    predicted = json.loads(told.stdout)
    measured = predicted["measured"]
    assert measured["steps"] >= 512 * measured["updates"] > 0
    steps_s = measured["seconds_per_step"] * (100_000_000 - measured["steps"])
    assert predicted["seconds"] > steps_s > measured["seconds"]
    assert predicted["memory_bytes_by_role"].keys() == {
        *("redis", "broker", "learner", "actor", "evaluator", "launcher"),
    }
    assert all(predicted["memory_bytes_by_role"].values())
    assert predicted["memory_bytes"] >= max(predicted["memory_bytes_by_role"].values())
    assert predicted["available"]["memory_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_few_steps_is_made_whole(tmp_path: Path) -> None:
    told = said("--dry-run", "--set", "learner.total_steps=1024", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    text = told.stdout
    assert "dry run of 1,024 steps" in text
    assert re.search(r"time +[0-9.]+ minutes\n", text)
    assert re.search(r"memory +\S+ .iB at most, \S+ .iB are free\n", text)


@pytest.fixture
def dry_run(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """One that is under way, of far more steps; its figures go where nothing is yet."""
    process = subprocess.Popen(
        penstock("train", *TINY, "--dry-run", "--set", "learner.total_steps=100000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_leaves_no_process_and_no_folder(dry_run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert dry_run.stdout is not None
    pids: set[int] = set()
    for line in dry_run.stdout:
        if " is up (pid " in line:
            pids.add(int(line.rpartition("(pid ")[2].rstrip(")\n")))
        if line.rstrip().endswith(" training"):
            break
    assert len(pids) >= 4
    os.kill(dry_run.pid, signal.SIGINT)
    _, err = dry_run.communicate(timeout=PATIENCE_S)
    assert dry_run.returncode == 130
    assert "interrupted" in err
    pause = threading.Event()
    while any(map(is_alive, pids)):
        pause.wait(0.05)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [(("--from", "{folder}"), "--dry-run --from"), (("--serve", "127.0.0.1:0"), "--dry-run --serve")],
)
def test_what_has_no_pace_of_its_own_is_bad_usage(more: tuple[str, ...], named: str, tmp_path: Path) -> None:
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording/recording.json").write_text("{}")
    told = said("--dry-run", *(word.format(folder=tmp_path / "recording") for word in more), cwd=tmp_path)
    assert told.returncode == 2
    assert named in told.stderr.splitlines()[-1]


def test_a_run_that_is_resumed_is_not_predicted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text('run = "r"\n')
    call = penstock("train", "--resume", str(tmp_path / "run"), "--dry-run")
    told = subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert told.returncode == 2
    assert "--dry-run --resume" in told.stderr.splitlines()[-1]
