"""`Goals-v0` as an environment: its spaces, its determinism, its rewards, and with real commands."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.host import ACTIONS, STATES, SimulatedHost
from penstock.workloads.goals.tasks.goal_task import GoalTask
from penstock.workloads.goals.tasks.potential import health
from tests.support.serving.goals_run import done, goals_file


def played(seed: int, actions: list[int]) -> list[Any]:
    """What an episode shows and pays."""
    task = GoalTask()
    first, _ = task.reset(seed=seed)
    return [first.tolist(), *[(step[0].tolist(), step[1]) for step in map(task.step, np.array(actions))]]


def test_it_is_a_gymnasium_environment() -> None:
    check_env(GoalTask(), skip_render_check=True)
    environment = gymnasium.make("penstock.workloads.goals.tasks:Goals-v0")
    environment.reset(seed=0)
    cut = [environment.step(0)[3] for _ in range(50)]
    assert cut == [False] * 49 + [True]
    assert environment.action_space.n == 11  # type: ignore[attr-defined]
    assert environment.observation_space.shape == (20,)


def test_equal_seeds_give_equal_episodes() -> None:
    actions = [int(one) for one in np.random.default_rng(0).integers(11, size=50)]
    assert played(1, actions) == played(1, actions)
    assert played(1, actions) != played(2, actions)


def test_doing_nothing_costs_a_step_and_tries_nothing() -> None:
    task = GoalTask()
    task.reset(seed=0)
    assert task.step(np.int64(0))[1] == pytest.approx(-0.01)
    check = np.int64(ACTIONS.index("check_disks"))
    assert task.step(check)[1] == pytest.approx(-0.51)


def test_readings_tell_every_state() -> None:
    host = SimulatedHost()
    signs = set()
    for index in range(len(STATES)):
        host._state = index
        seen = host.read()
        signs.add((seen.cpu, seen.memory, seen.disk, seen.processes))
    assert len(signs) == len(STATES)


def test_shaping_is_a_potential_of_what_is_seen() -> None:
    task = GoalTask()
    healthy, _ = task.reset(seed=0)
    ill = healthy.copy()
    ill[:3] += 0.5
    assert health({"observation": np.stack([healthy, ill])}) == pytest.approx([-0.4, -1.9], abs=1e-6)


def test_commands_act_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    spool = tmp_path / "own"
    spool.mkdir()
    (spool / "a.log").write_text("full")
    file = tmp_path / "goals.toml"
    file.write_text(
        f'folder = "{spool}"\nallow = ["/usr/bin/rm"]\n'
        '[[goal]]\nname = "empty"\ncommand = ["/usr/bin/rm", "a.log"]\n'
    )
    task = GoalTask(executor="commands", goals=str(file), actors_act=True)
    task.reset(seed=0)
    _, reward, *_, info = task.step(np.int64(1))
    assert info["goal"] == "empty"
    assert reward == pytest.approx(1.19 if info["outcome"].took_s < 0.5 else 0.99)
    assert list(spool.iterdir()) == []
    assert task.step(np.int64(1))[1] == pytest.approx(-0.51)
    assert task.step(np.int64(0))[1] == pytest.approx(-0.01)


def test_it_starts_no_command_unless_actors_act(tmp_path: Path) -> None:
    task = GoalTask(executor="commands", goals=str(goals_file(tmp_path)))
    assert (task.observation_space.shape, task.action_space.n) == ((12,), 3)  # type: ignore[attr-defined]
    for refused in (task.reset, lambda: task.step(np.int64(1)), lambda: task.step(np.int64(2))):
        with pytest.raises(ConfigurationError, match="environment.kwargs.actors_act=true"):
            refused()
    assert done(tmp_path) == 0


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"executor": "shell"}, "executor='shell': must be one of simulated, commands"),
        ({"executor": "commands"}, "environment.kwargs.goals: is missing"),
        ({"goals": "goals.toml"}, "environment.kwargs.goals='goals.toml': is for .*executor='commands'"),
        (
            {"executor": "commands", "goals": "g", "actors_act": "true"},
            "actors_act='true': must be true or false",
        ),
        ({"executor": "commands", "goals": "g", "actors_act": 1}, "actors_act=1: must be true or false"),
        ({"rewards": {"luck": 1.0}}, "rewards=.*luck"),
    ],
)
def test_arguments_are_checked(kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        GoalTask(**kwargs)
