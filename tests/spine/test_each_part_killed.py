"""Each part of a run is killed once: the launcher starts it again, and the books balance."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.run.training import LONG, OFTEN, Training, trainings

PARTS = ("actor-0", "broker", "learner", "redis")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


def test_a_run_goes_on_after_the_death_of_each_of_its_parts(start: Callable[..., Training]) -> None:
    """`kill -9` of an actor, the broker, the learner and Redis.

    Then it drains when asked and its books balance.
    """
    training = start("CartPole-v1", *LONG, *OFTEN)
    for name in PARTS:
        training.until_steps(training.steps() + 2_000)
        os.kill(training.pids()[name], signal.SIGKILL)
    training.until_steps(training.steps() + 2_000)
    training.process.send_signal(signal.SIGINT)
    code, out, err = training.end()
    assert code == 130, err
    summary = training.summary()
    assert summary["ledger"]["balanced"]
    assert restarts(summary) == {"actor": 1, "broker": 1, "learner": 1, "redis": 1}
    assert "learner died (signal 9), restarting" in out


@pytest.mark.slow
def test_a_run_survives_the_death_of_each_of_its_parts(start: Callable[..., Training]) -> None:
    """`kill -9` of an actor, the broker, the learner and Redis: it still solves and the books balance."""
    training = start(
        "CartPole-v1", "--total-steps", "400000", "--set", "learner.stop_at_target=false", *OFTEN
    )
    steps = 20_000
    for name in PARTS:
        training.until_steps(steps)
        steps = training.steps() + 30_000
        os.kill(training.pids()[name], signal.SIGKILL)
    code, out, err = training.end()
    assert code == 0, err
    summary = training.summary()
    assert summary["solved"]
    assert summary["ledger"]["balanced"]
    assert restarts(summary) == {"actor": 1, "broker": 1, "learner": 1, "redis": 1}
    assert "learner died (signal 9), restarting" in out


def restarts(summary: dict[str, Any]) -> dict[str, int]:
    """How often processes of each role that was killed were started again."""
    roles = Counter[str]()
    for one in summary["processes"]:
        roles[one["role"]] += one["restarts"]
    return {role: roles[role] for role in ("actor", "broker", "learner", "redis")}
