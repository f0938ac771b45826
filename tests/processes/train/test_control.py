"""`penstock control` on a run of real processes: pause, resume, checkpoint, restore, stop; then the books."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.audit.audit_command import audit
from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import Training, wait_until_gone


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    arguments = (
        "CartPole-v1", "--total-steps", "100000000",
        "--set", "learner.stop_at_target=false", "--set", "learner.record=" + str(tmp_path / "recording"),
        "--set", f"actor.ack_journal={tmp_path / 'run' / 'journals'}",
    )  # fmt: skip
    started = Training(tmp_path / "run", *arguments)
    yield started
    started.process.kill()
    started.process.communicate()
    wait_until_gone(started)


def control(run: str, *arguments: str, code: int = 0) -> str:
    command = penstock("control", arguments[0], run, *arguments[1:])
    reply = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert reply.returncode == code, reply.stderr + reply.stdout
    return reply.stdout or reply.stderr


def asked(run: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(control(run, *arguments, "--json", code=code)))


def test_a_run_is_steered_from_the_command_line(training: Training) -> None:
    run = str(training.run_dir)
    training.until_steps(4_000)
    assert asked(run, "pause", "--reason", "lunch")["desired"] == "paused"
    named = asked(run, "checkpoint", "--name", "good")
    assert named["state"] == "COMMAND_STATE_DONE"
    address = next(
        one["address"]
        for one in json.loads((training.run_dir / "endpoints.json").read_text()).values()
        if one["role"] == "broker"
    )
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
