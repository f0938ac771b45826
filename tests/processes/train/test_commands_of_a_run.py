"""Runs that are steered, resumed, predicted and held as jobs from the command line."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import dump
from penstock.launch.audit.audit_command import audit
from penstock.launch.run.supervisor import penstock
from tests.support.run import harness
from tests.support.run.harness import LONG, PATIENCE_S, Training, command, eventually, is_alive
from tests.support.run.learner_run import BATCH, Producer, settings


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Training]:
    arguments = (
        "CartPole-v1", "--total-steps", "100000000",
        "--set", "learner.stop_at_target=false", "--set", "learner.record=" + str(tmp_path / "recording"),
        "--set", f"actor.ack_journal={tmp_path / 'run' / 'journals'}",
    )  # fmt: skip
    with harness.run(tmp_path / "run", *arguments) as started:
        yield started


def control(run: str, *arguments: str, code: int = 0) -> str:
    reply = command("control", arguments[0], run, *arguments[1:])
    assert reply.returncode == code, reply.stderr + reply.stdout
    return reply.stdout or reply.stderr


def asked(run: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(control(run, *arguments, "--json", code=code)))


def test_a_run_is_steered_from_the_command_line(endless: Training) -> None:
    training, run = endless, str(endless.run_dir)
    training.until_steps(4_000)
    assert asked(run, "pause", "--reason", "lunch")["desired"] == "paused"
    named = asked(run, "checkpoint", "--name", "good")
    assert named["state"] == "COMMAND_STATE_DONE"
    address = training.endpoints()["broker"]["address"]
    assert asked(address, "resume")["desired"] == "running"
    training.until_steps(training.steps() + 4_000)
    restored = asked(run, "restore", "good", "--request-id", "back-1")
    assert restored["state"] == "COMMAND_STATE_DONE"
    assert asked(address, "restore", "good", "--request-id", "back-1") == restored
    training.until_steps(training.steps() + 4_000)
    assert asked(run, "pause")["desired"] == "paused"
    unknown = asked(run, "restore", "bad", code=1)
    assert (unknown["state"], unknown["refusal"]) == ("COMMAND_STATE_REFUSED", "COMMAND_REFUSAL_NAME")
    assert "there are: good" in control(run, "restore", "bad", "--request-id", "bad-2", code=1)
    assert "is not an id" in control(run, "restore", "../good", code=2)
    assert "as an address" in control("no-such-run", "pause", code=2)
    assert "stopping" in control(run, "stop", "--reason", "enough")
    training.end()
    assert "has ended" in control(run, "pause", code=1)
    verdict = audit(training.run_dir)
    assert verdict.clean, [str(problem) for problem in verdict.problems]
    assert training.summary()["ledger"]["balanced"]
    assert verdict.fragments["restored"] == training.summary()["ledger"]["dropped"].get("restored", 0)


def test_random_episodes_are_counted_written_and_plotted(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    training = start(
        "CartPole-v1", "--episodes", "60", "--json", "--set", "algorithm.name=random",
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
    assert len(lines) == summary["training_episodes"] >= 60
    assert all(line["return"] == line["length"] for line in lines)
    assert (run / "policies" / "latest").resolve().exists()
    assert list((run / "checkpoints").glob("*/tensors.safetensors.lz4"))
    drawn = command("graph", str(run))
    assert f"after {summary['env_steps']:,} steps" in drawn.stdout


def test_a_terminal_of_few_characters_fails_no_command_that_succeeded(
    start: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    training = start(
        "CartPole-v1", "--actors", "1", "--total-steps", "4000", "--set", "evaluation.episodes=2",
        "--set", "algorithm.batch_steps=512", "--set", "learner.stop_at_target=false",
    )  # fmt: skip
    code, out, err = training.end()
    assert code == 0, err
    assert "\\xb1" in out, "a deviation is written behind it"
    run = str(training.run_dir)
    for encoding in ("ascii", "latin-1"):
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
        for words in (("evaluate", run, "--episodes", "2"), ("graph", run), ("audit", run)):
            done = command(*words, encoding=encoding)
            assert done.returncode == 0, (words, done.stderr)
            assert "Traceback" not in done.stderr


def test_a_run_ends_when_its_time_is_over(start: Callable[..., Training]) -> None:
    training = start(
        "CartPole-v1", "--json", "--set", "learner.total_seconds=0.5",
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
    return command("jobs", *words, cwd=folder)


def test_a_job_outlives_its_starter_until_it_is_stopped(tmp_path: Path) -> None:
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


KNOWN = ("config.toml", "learner.json", "summary.json", "metrics.jsonl")
SMALL = (
    "CartPole-v1", "--actors", "1", "--total-steps", "4000", "--target-return", "15",
    "--set", "evaluation.episodes=2", "--set", "learner.stop_at_target=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that has ended; tests that let something happen to it take a copy."""
    with harness.run(tmp_path_factory.mktemp("ended") / "run", *SMALL) as training:
        code, _, err = training.end()
    assert code == 0, err
    return training.run_dir


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder: when it was written, and what it holds."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.mark.promise("refused-resume-writes-nothing")
@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("environment.id=Acrobot-v1", "environment.id"),
        ("actor.unroll_length=7", "actor.unroll_length"),
        ("run=other", "run"),
        ("policy.hidden_sizes=[8]", "policy.hidden_sizes"),
    ],
)
def test_a_refused_resume_writes_nothing(said: str, key: str, ended: Path) -> None:
    before = content(ended)
    done = command("train", "--resume", str(ended), "--set", said)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{key}=")
    assert done.stdout == ""
    assert content(ended) == before


def test_a_file_in_place_of_a_folder_ends_the_run_with_its_name(ended: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    shutil.rmtree(folder / "policies")
    (folder / "policies").write_text("somebody's")
    done = command("train", "--resume", str(folder), "--total-steps", "8000")
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"learner cannot use {folder / 'policies'}"), done.stderr
    assert "move it away" in last
    assert (folder / "policies").read_text() == "somebody's"


def resumed_until(folder: Path, words: str, *arguments: str) -> tuple[int, str]:
    """Resume, and press Ctrl-C when the launcher has said this; exit code and error output."""
    process = subprocess.Popen(
        penstock("train", "--resume", str(folder), *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert any(words in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.promise("refused-resume-writes-nothing")
def test_an_attempt_that_learned_nothing_keeps_the_runs_state(ended: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    before = content(folder)
    code, err = resumed_until(folder, ": starting ", "--total-steps", "100000000", "--seed", "7")
    assert code == 130, err
    after = content(folder)
    assert {name: after[name] for name in KNOWN} == {name: before[name] for name in KNOWN}
    assert "summary.json is as it was" in err
    assert "config.next.toml" not in after


def test_settings_of_an_attempt_that_learned_become_the_runs(ended: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    code, err = resumed_until(folder, " training", "--total-steps", "100000000", "--actors", "2")
    assert code == 130, err
    assert "count = 2\n" in (folder / "config.toml").read_text().partition("[actor]")[2].partition("\n\n")[0]
    assert not (folder / "config.next.toml").exists()
    assert '"interrupted": true' in (folder / "summary.json").read_text()


TINY = (
    "CartPole-v1", "--actors", "1", "--total-steps", "4000", "--set", "learner.stop_at_target=false",
    "--set", "evaluation.episodes=4", "--set", "algorithm.batch_steps=512",
)  # fmt: skip


def said(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return command("train", *TINY, *arguments, timeout=4 * PATIENCE_S, cwd=cwd)


def test_a_runs_time_is_predicted_from_a_short_run(tmp_path: Path) -> None:
    told = said("--dry-run", "--json", "--set", "learner.total_steps=100000000", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    predicted = json.loads(told.stdout)
    measured = predicted["measured"]
    assert measured["steps"] >= 512 * measured["updates"] > 0
    steps_s = measured["seconds_per_step"] * (100_000_000 - measured["steps"])
    assert predicted["seconds"] > steps_s > measured["seconds"]
    assert predicted["memory_bytes_by_role"].keys() == {
        *("redis", "broker", "learner", "actor", "evaluator", "launcher")
    }
    assert all(predicted["memory_bytes_by_role"].values())
    assert predicted["memory_bytes"] >= max(predicted["memory_bytes_by_role"].values())
    assert predicted["available"]["memory_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_short_run_is_tried_in_full(tmp_path: Path) -> None:
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


@pytest.mark.promise("learner-finished-stays-alive")
def test_a_finished_learner_stays_until_told_to_end(redis_url: str, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(dump(settings(learner={"total_steps": 2 * BATCH, "stop_at_target": False})))
    run_dir = tmp_path / "run"
    words = ("learner", "--redis", redis_url, "--run-dir", str(run_dir), "--config", str(config))
    with harness.service(tmp_path, *words, "--resume", "--stay") as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], (run_dir / "learner.json").exists)
        eventually(lambda: producer.status().latest.update >= 2, "the last update", PATIENCE_S)
        assert json.loads((run_dir / "learner.json").read_text())["finished"]
        assert learner.process.poll() is None
        assert learner.get("/healthz")[0] == learner.get("/readyz")[0] == 200
        learner.process.send_signal(signal.SIGTERM)
        assert learner.process.wait(PATIENCE_S) == 0


def test_a_policy_server_is_alive_before_there_is_a_run(tmp_path: Path) -> None:
    port = free_port()
    address = ("--broker", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--set", f"metrics.port={port}")
    with harness.service(tmp_path, "serve", *address) as server:
        server.endpoint_file.write_text(json.dumps({"role": "server", "pid": 0, "metrics_port": port}))
        eventually(lambda: b"127.0.0.1:1" in server.log.read_bytes(), "a word about the broker", PATIENCE_S)
        assert server.get("/healthz") == (200, "ok\n")
        assert server.get("/readyz") == (503, "starting\n")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
