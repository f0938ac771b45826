"""What the processes of a run have loaded: each the libraries that its work needs, and no more."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.run.harness import LONG, Training, trainings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is Linux's to tell")

TORCH, GRPC = "libtorch", "cygrpc"
EVALUATED: Final = ("--set", "evaluation.interval_steps=2000", "--set", "evaluation.episodes=2")
LOADED: Final = {
    "launcher": set(),
    "redis": {GRPC},  # as a copy of the fork server: the pages are the others'
    "broker": {GRPC},
    "learner": {GRPC, TORCH},
    "actor-0": {GRPC},
    "actor-1": {GRPC},
    "evaluator": {GRPC},
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.mark.parametrize(
    ("environment", "policy"),
    [("CartPole-v1", ()), ("Pendulum-v1", ("--set", "policy.normalise_observations=true"))],
)
def test_the_learner_of_a_small_network_is_the_only_one_with_torch(
    environment: str, policy: tuple[str, ...], start: Callable[..., Training]
) -> None:
    training = start(environment, *LONG, *policy, *EVALUATED)
    training.until_steps(4_000)
    training.until(lambda: "evaluated" in (training.run_dir / "logs" / "evaluator.log").read_text())
    endpoints = json.loads((training.run_dir / "endpoints.json").read_text())
    pids = {name: one["pid"] for name, one in endpoints.items()} | {"launcher": training.process.pid}
    mapped = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    assert {
        name: {library for library in (TORCH, GRPC) if library in text} for name, text in mapped.items()
    } == LOADED
