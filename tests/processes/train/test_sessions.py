"""A session of so many episodes, of random actions, with a line for each, and its curve in the terminal."""

import json
import os
import subprocess
from pathlib import Path

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import LONG, PATIENCE_S, Training, eventually


def test_episodes_of_random_actions_are_counted_written_and_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(
        run, "CartPole-v1", "--episodes", "60", "--json", "--set", "algorithm.name=random",
        "--set", "algorithm.batch_steps=128", "--set", "actor.unroll_length=16",
        "--set", "environment.count=4", "--set", "learner.episode_log=true",
        "--set", "learner.checkpoint_compression=lz4",
    )  # fmt: skip
    code, _, err = training.end()
    assert code == 0, err
    summary = training.summary()
    assert summary["ending"] == "episodes"
    assert summary["ledger"]["balanced"]
    assert 10 < summary["mean_return"] < 40
    assert 10 < summary["evaluation"]["mean"] < 40, "played as in training, not by the most likely action"
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert [line["episode"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 60
    assert all(line["return"] == line["length"] for line in lines)
    assert (run / "policies" / "latest").resolve().exists()
    assert list((run / "checkpoints").glob("*/tensors.safetensors.lz4"))
    drawn = subprocess.run(penstock("graph", str(run)), capture_output=True, text=True, check=True)
    assert f"after {summary['env_steps']:,} steps" in drawn.stdout


def test_a_run_ends_when_its_time_is_over(tmp_path: Path) -> None:
    training = Training(
        tmp_path / "run", "CartPole-v1", "--json", "--set", "learner.total_seconds=0.5",
        "--set", "algorithm.batch_steps=128", "--set", "actor.unroll_length=16",
        "--set", "environment.count=4", "--set", "evaluation.episodes=2",
        "--set", "learner.stop_at_target=false",
    )  # fmt: skip
    code, _, err = training.end()
    assert code == 0, err
    summary = training.summary()
    assert summary["ending"] == "seconds"
    assert summary["updates"] > 0
    assert summary["evaluation"]["version"] == summary["policy_version"]
    assert not summary["interrupted"]


def niceness(run: Path) -> dict[str, int]:
    told = json.loads((run / "endpoints.json").read_text())
    return {one["role"]: os.getpriority(os.PRIO_PROCESS, one["pid"]) for one in told.values()}


def jobs(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = penstock("jobs", *words)
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_a_job_goes_on_without_who_started_it_until_it_is_stopped(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/s"
    started = jobs(tmp_path, "start", "--name", "pole", "CartPole-v1", *LONG, "--serve", socket)
    assert started.returncode == 0, started.stderr
    again = jobs(tmp_path, "start", "--name", "pole", "CartPole-v1")
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    wrong = jobs(tmp_path, "start", "--name", "wrong", "No-such-environment-v0")
    assert wrong.returncode == 1, wrong.stderr
    assert "No-such-environment" in wrong.stderr
    found = {one["name"]: one for one in json.loads(jobs(tmp_path, "list", "--json").stdout)}
    assert {name: one["state"] for name, one in found.items()} == {"pole": "running"}
    eventually((tmp_path / "runs" / "pole" / "metrics.jsonl").exists, "training", within_s=PATIENCE_S)
    eventually(lambda: "server" in niceness(tmp_path / "runs" / "pole"), "a server", within_s=PATIENCE_S)
    nice = niceness(tmp_path / "runs" / "pole")
    assert {nice["learner"], nice["actor"]} == {min(nice["server"] + 10, 19)}, "clients go first"
    assert jobs(tmp_path, "stop", "pole").returncode == 0
    followed = jobs(tmp_path, "logs", "pole", "--follow")
    assert "ledger       balanced" in followed.stdout, followed.stdout
    told = jobs(tmp_path, "list").stdout
    assert "interrupted" in told
    for words in (("stop", "absent"), ("logs", "absent"), ("start", "--name", "../x", "CartPole-v1")):
        assert jobs(tmp_path, *words).returncode == 2
