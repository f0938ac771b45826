"""Runs whose actors and evaluator step EnvPool's environments: equal in lock-step, and whole after kills."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import LONG, OFTEN, PATIENCE_S, Training, trainings, wait_until_gone

pytest.importorskip("envpool", reason="EnvPool is an extra")

BY_ENVPOOL = ("CartPole-v1", "--set", "environment.vectorise=envpool")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.mark.slow
def test_two_runs_in_lock_step_are_equal_bit_by_bit(tmp_path: Path) -> None:
    told = []
    for threads in (1, 3):
        folder = tmp_path / f"by-{threads}"
        command = penstock(
            "train", *BY_ENVPOOL, "--run-dir", str(folder), "--actors", "2", "--seed", "5",
            "--total-steps", "6144", "--set", f"environment.kwargs.num_threads={threads}",
            "--set", "algorithm.staleness=0", "--set", "run=the-same", "--set", "evaluation.episodes=7",
        )  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        evaluated = next(line for line in done.stdout.splitlines() if line.startswith("  evaluation "))
        told.append(((folder / "policies" / "final.safetensors").read_bytes(), evaluated))
    assert told[0] == told[1]


@pytest.mark.slow
def test_a_run_survives_kills_and_is_resumed(start: Callable[..., Training]) -> None:
    training = start(*BY_ENVPOOL, *LONG, *OFTEN)
    for name in ("actor-0", "evaluator"):
        training.until_steps(training.steps() + 2_000)
        os.kill(training.pids()[name], signal.SIGKILL)
    training.until_steps(training.steps() + 4_000)
    for pid in [*training.pids().values(), training.process.pid]:
        with contextlib.suppress(ProcessLookupError):  # some end with those that were killed before
            os.kill(pid, signal.SIGKILL)
    training.process.communicate()
    wait_until_gone(training)
    again = start("--resume")
    again.until_steps(4_000)
    again.process.send_signal(signal.SIGINT)
    code, _, err = again.end()
    assert code == 130, err
    assert again.summary()["ledger"]["balanced"]
