import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from torch import nn

from penstock.client import PolicyClient
from penstock.launch.run.supervisor import penstock
from penstock.registry.records import Status
from tests.support.run import harness
from tests.support.run.harness import LONG, OFTEN, PATIENCE_S, Training, eventually, is_alive, trainings
from tests.support.run.serving_run import ServedRun, begun, follow


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder, as on a machine where nothing has been drawn before."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.mark.promise("acknowledged-fragment-trained-dropped")
def test_cartpole_is_solved_by_separate_processes_and_the_books_balance(
    start: Callable[..., Training],
) -> None:
    training = start("CartPole-v1", "--seed", "1", "--json")
    code, out, err = training.end()
    assert code == 0, err
    assert "Logging error" not in err
    summary = json.loads(out)
    assert summary == training.summary()
    assert summary["solved"]
    assert summary["evaluation"]["mean"] >= 475
    assert summary["evaluation"]["episodes"] == 100
    solved = summary["solved_at"]
    assert solved["version"] == summary["evaluation"]["version"] == summary["policy_version"]
    assert (solved["seconds"], solved["env_steps"]) < (summary["training_seconds"], summary["env_steps"])
    whole = summary["env_steps"] / summary["env_steps_per_second"]
    assert summary["training_seconds"] == pytest.approx(whole, abs=0.1)
    assert summary["ledger"]["balanced"]
    assert summary["env_steps"] <= 160_000
    assert {one["role"] for one in summary["processes"]} >= {
        "redis",
        "broker",
        "learner",
        "actor",
        "evaluator",
    }
    assert len({one["pid"] for one in summary["processes"]}) == len(summary["processes"])
    for name in (
        "config.toml",
        "learning-curve.png",
        "metrics.jsonl",
        "lineage.jsonl",
        "endpoints.json",
        "targets.json",
    ):
        assert (training.run_dir / name).stat().st_size > 0
    assert not any(is_alive(pid) for pid in training.pids().values())
    reply = subprocess.run(
        penstock("evaluate", str(training.run_dir), "--episodes", "20", "--json"),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert json.loads(reply.stdout)["mean"] >= 475


def test_clients_episodes_are_learned_and_accounted_for(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/serve.sock"
    training = Training(
        tmp_path / "run", "CartPole-v1", "--seed", "1", "--actors", "0", "--serve", address,
        "--total-steps", "2500", "--set", "learner.stop_at_target=false", "--set", "evaluation.episodes=2",
        "--set", f"actor.ack_journal={tmp_path / 'journals'}",
    )  # fmt: skip
    players = subprocess.Popen(
        [sys.executable, "-m", "tests.learning.cartpole_clients", address, "6", "0"],
        stderr=subprocess.DEVNULL,
    )
    try:
        code, _, err = training.end(4 * PATIENCE_S)
    finally:
        players.kill()
        players.wait()
        training.process.kill()
    assert code == 0, err
    summary = training.summary()
    assert summary["env_steps"] >= 2500
    assert summary["updates"] > 1
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert not any(one["role"] == "actor" for one in summary["processes"])
    audit(training.run_dir, tmp_path)


@pytest.mark.promise("ctrl-c-drains-run")
def test_ctrl_c_drains_within_15_seconds_and_resume_continues(start: Callable[..., Training]) -> None:
    first = start("CartPole-v1", *LONG)
    first.until_steps(2_000)
    status = subprocess.run(
        penstock("status", str(first.run_dir), "--json"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(status.stdout)["desired"] == "RUN_STATE_RUNNING"
    first.process.send_signal(signal.SIGINT)
    code, out, err = first.end()
    assert code == 130
    # After 15 seconds the launcher kills what is left, and says so.
    assert "did not drain in time" not in out + err
    assert "interrupted" in out
    assert not any(is_alive(pid) for pid in first.pids().values())
    stopped = first.summary()
    assert stopped["interrupted"]
    assert stopped["ledger"]["balanced"]
    before = _lineage(first)

    second = start("--resume")
    assert second.steps() == stopped["env_steps"]
    second.until_steps(2_000)
    second.process.send_signal(signal.SIGTERM)
    code, _, err = second.end()
    assert code == 130, err
    resumed = second.summary()
    assert resumed["run"] == stopped["run"]
    assert resumed["env_steps"] >= stopped["env_steps"] + 2_000
    assert resumed["ledger"]["balanced"]
    # A slow actor's fragment may be stale in either run; none is because of the restart.
    of_first = {session for line in before for session in line["sessions"]}
    assert of_first
    for line in _lineage(second)[len(before) :]:
        assert of_first.isdisjoint(line["left_out"].get("stale", ()))


def _lineage(training: Training) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (training.run_dir / "lineage.jsonl").read_text().splitlines()]


PARTS = ("actor-0", "broker", "learner", "redis")


def audit(folder: Path, cwd: Path) -> dict[str, Any]:
    """What `penstock audit` finds, from another folder; AssertionError unless the books balance."""
    process = subprocess.run(
        penstock("audit", str(folder), "--json"),
        cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return dict(json.loads(process.stdout))


@pytest.mark.promise("counts-balance-actor-broker")
def test_a_run_continues_after_the_death_of_each_of_its_parts(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    journals = os.path.relpath(tmp_path / "acknowledged")
    training = start("CartPole-v1", *LONG, *OFTEN, "--set", f"actor.ack_journal={journals}")
    for name in PARTS:
        training.until_steps(training.steps() + 2_000)
        os.kill(training.pids()[name], signal.SIGKILL)
    training.until_steps(training.steps() + 2_000)
    live = audit(training.run_dir, tmp_path)
    assert "own Redis" in live["sources"]["log"]
    assert sum(live["journalled"].values()) > 0
    training.process.send_signal(signal.SIGINT)
    code, out, err = training.end()
    assert code == 130, err
    summary = training.summary()
    assert summary["ledger"]["balanced"]
    assert restarts(summary) == {"actor": 1, "broker": 1, "learner": 1, "redis": 1}
    assert "learner died (signal 9), restarting" in out
    assert_accounted(training.run_dir, tmp_path, summary["ledger"])


def assert_accounted(run_dir: Path, cwd: Path, ledger: dict[str, Any]) -> None:
    """The files of a run that has ended agree with each other and with what its actors recorded."""
    ended = audit(run_dir, cwd)
    assert "the run has ended" in ended["sources"]["log"]
    assert ended["fragments"]["trained"] == ledger["trained"]
    assert ended["counters"]["acked"] == ledger["acked"] == sum(ended["fragments"].values())
    # All but what a killed actor saw acknowledged in its last moment.
    assert sum(ended["journalled"].values()) >= ledger["acked"] - 8
    lines = [json.loads(line) for line in (run_dir / "lineage.jsonl").read_text().splitlines()]
    assert all(line["digests"].keys() == line["sessions"].keys() for line in lines)


def restarts(summary: dict[str, Any]) -> dict[str, int]:
    """How often processes of each role that was killed were started again."""
    roles = Counter[str]()
    for one in summary["processes"]:
        roles[one["role"]] += one["restarts"]
    return {role: roles[role] for role in ("actor", "broker", "learner", "redis")}


ROWS: Final = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ServedRun:
    """A run whose version 1 was active first; tests add versions."""
    return begun(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def client(run: ServedRun) -> Iterator[PolicyClient]:
    """Of a server over it; answers are never slow, and clients are compared soon."""
    settings: dict[str, Any] = {"canary.settle_s": 0.05, "canary.slow_ms": 1e6}
    with (
        harness.server(run.folder.parent, run.folder, **settings) as server,
        PolicyClient(server.address, deadline_s=60.0) as connected,
    ):
        yield connected


@pytest.mark.promise("canary-worse-withdrawn-share")
@pytest.mark.parametrize("kind", ["nan", "negated"])
def test_a_bad_canary_is_withdrawn(run: ServedRun, client: PolicyClient, kind: str) -> None:
    follow(run, client, good := run.next_version())
    policy, bad = run.policies[good], run.build(good)
    if kind == "nan":
        nn.init.constant_(bad.actor_head.bias, float("nan"))
    else:
        bad.actor_head.weight.data.neg_()
    best = int(policy.act({"observation": ROWS[:1]}, deterministic=True).action["action"][0])
    canary = run.next_version(bad)
    run.promote(canary, canary_share=0.1)
    for number in itertools.count():
        assert number < 1500, "the canary is still there"
        episode = client.start_episode(f"client-{number}")
        given = episode.act(ROWS[0], deterministic=True)
        episode.end(terminated=True, reward=float(given.action == best))
        if number % 20 == 19 and run.status(canary) is Status.ROLLED_BACK:
            break
    eventually(lambda: {client.act(ROWS[0]).version for _ in range(60)} == {good}, "everybody back")
    assert run.status(good) is Status.ACTIVE
