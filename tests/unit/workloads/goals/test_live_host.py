"""Runs of a live host: their spaces, their target, and what is refused before they start."""

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Progress, Settings, load
from penstock.workloads.control.environment import spaces
from penstock.workloads.goals.live_host import SOLVED, prepare, rehearse, target
from tests.support.serving.goals_run import ACTION, OBSERVATION, done, goals_file

QUIET = Progress(print, threading.Event())


def settings(folder: Path, count: int = 0, slots: int = 1, **kwargs: Any) -> Settings:
    """Of a run whose goals are two commands."""
    commands = {"executor": "commands", "goals": str(goals_file(folder))}
    environment = {
        "id": "Goals-v0",
        "count": slots,
        "kwargs": commands | kwargs,
    }
    return load([{"workload": "goals", "environment": environment, "actor": {"count": count}}])


def test_its_spaces_are_known_and_nothing_has_run(tmp_path: Path) -> None:
    for number, acts in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        section = settings(folder, actors_act=acts).environment
        assert spaces(section) == (OBSERVATION, ACTION)
        assert done(folder) == 0
        with pytest.raises(ConfigurationError, match="unexpected keyword argument 'luck'"):
            spaces(section.model_copy(update={"kwargs": {**section.kwargs, "luck": 1}}))


def test_the_target_is_that_of_the_simulated_host(tmp_path: Path) -> None:
    live = settings(tmp_path).environment
    assert target(live) is None
    assert target(live.model_copy(update={"kwargs": {}})) == SOLVED
    assert target(live.model_copy(update={"id": "CartPole-v1", "kwargs": {}})) == 475


def test_it_is_not_evaluated(tmp_path: Path) -> None:
    live = settings(tmp_path, count=1, actors_act=True)
    assert prepare(live, tmp_path, QUIET).evaluation.episodes == 0
    simulated = load([{"workload": "goals", "environment": {"id": "Goals-v0"}}])
    assert prepare(simulated, tmp_path, QUIET) == rehearse(simulated, tmp_path, QUIET).settings == simulated


@pytest.mark.parametrize(
    ("count", "slots", "kwargs", "why"),
    [
        (1, 1, {}, "actor.count=1: .*actors_act=true"),
        (1, 1, {"actors_act": "true"}, "actor.count=1: .*actors_act=true"),
        (1, 16, {"actors_act": True}, "environment.count=16: .*set both to 1"),
        (2, 1, {"actors_act": True}, "actor.count=2, .*set both to 1"),
    ],
)
def test_actors_act_only_where_the_run_says_so(
    tmp_path: Path, count: int, slots: int, kwargs: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        prepare(settings(tmp_path, count, slots, **kwargs), tmp_path, QUIET)


def test_a_dry_run_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--dry-run: .*executor='simulated'"):
        rehearse(settings(tmp_path, 1, actors_act=True), tmp_path, QUIET)
