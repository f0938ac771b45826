"""`Traces-v0`: what a log answers in each mode, beside the truth that the log was drawn from."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.tasks.trace_replay import TraceReplay
from tests.support.experience.bandit_log import PLAIN, bandit_log, line, written
from tests.support.oracles import off_policy_truth as truth

TARGET = np.array(truth.TARGET)


def returns_of(task: TraceReplay, episodes: int) -> np.ndarray:
    """Rewards of single decisions of the bandit's target policy."""
    draw = np.random.default_rng(1)
    rewards = []
    seen, _ = task.reset(seed=0)
    for _ in range(episodes):
        action = draw.choice(3, p=TARGET[int(seen[:3].argmax())])
        _, reward, terminated, truncated, _ = task.step(np.int64(action))
        assert terminated
        assert not truncated
        rewards.append(reward)
        seen, _ = task.reset()
    return np.array(rewards)


def test_it_is_a_gymnasium_environment(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 100)
    check_env(TraceReplay(trace_file=str(path)), skip_render_check=True)
    made = gymnasium.make("penstock.workloads.goals.tasks:Traces-v0", trace_file=str(path), mode="model")
    assert made.reset(seed=0)[1] == {"mode": "model"}


def test_matched_decisions_earn_what_is_true(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 6000)
    found = returns_of(TraceReplay(trace_file=str(path), reward=PLAIN), 6000)
    error = found.std() / np.sqrt(len(found))
    value = truth.bandit_value(truth.TARGET)
    assert abs(found.mean() - value) < 4 * error
    assert error < 0.03
    assert abs(found.mean() - truth.bandit_value(truth.LOGGING)) > 4 * error


def test_a_full_log_answers_every_action(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = []
    for number, event in enumerate(truth.bandit_log(0, 1500)):
        well = draw.random(3) < np.array(truth.SUCCESS[event.context])
        outcomes = {f"action{index}": {"success": bool(one)} for index, one in enumerate(well)}
        lines.append(line(number, event, metadata={"outcomes": outcomes}))
    task = TraceReplay(trace_file=str(written(tmp_path, lines)), mode="full", reward=PLAIN)
    found = returns_of(task, 1500)
    assert abs(found.mean() - truth.bandit_value(truth.TARGET)) < 4 * found.std() / np.sqrt(len(found))


def test_a_model_answers_by_what_it_has_fitted(tmp_path: Path) -> None:
    task = TraceReplay(trace_file=str(bandit_log(tmp_path, 0, 5000)), mode="model", reward=PLAIN)
    for episode in range(30):
        seen, _ = task.reset(seed=episode)
        context, action = int(seen[:3].argmax()), episode % 3
        _, reward, _, _, info = task.step(np.int64(action))
        assert abs(reward - truth.SUCCESS[context][action]) < 0.08
        assert info == {"mode": "model", "known": True}


def episodes_log(folder: Path) -> Path:
    """Two episodes of three decisions: `go` each time."""
    lines = [
        json.dumps(
            {
                "time": 0.0,
                "episode": name,
                "step": step,
                "observation": {"step": float(step)},
                "action": "go" if step < 2 or name == "a" else "stop",
                "result": {"success": True, "execution_time_ms": 7.0},
            }
        )
        for name in ("a", "b")
        for step in range(3)
    ]
    return written(folder, lines)


def test_another_action_ends_an_episode_of_several_decisions(tmp_path: Path) -> None:
    task = TraceReplay(trace_file=str(episodes_log(tmp_path)))
    seen, _ = task.reset(seed=0)
    assert seen[0] == 0
    assert seen[-4:].tolist() == [0, 0, 0, 0]
    seen, reward, terminated, truncated, info = task.step(np.int64(0))
    assert reward == pytest.approx(1.19)
    assert (terminated, truncated, info["known"]) == (False, False, True)
    assert seen[-4:] == pytest.approx([1, 1, 0, np.log(8)]), "the last result is seen, the next one is not"
    _, reward, terminated, truncated, info = task.step(np.int64(1))
    assert (reward, terminated, truncated, info["known"]) == (0, False, True, False)
    for _ in range(2):
        task.reset()
        ends = [task.step(np.int64(task._encoding.action(one.action)))[2:4] for one in task._episode]
        assert ends == [(False, False), (False, False), (True, False)]


def test_an_episode_is_cut_at_its_longest(tmp_path: Path) -> None:
    task = TraceReplay(trace_file=str(episodes_log(tmp_path)), max_episode_length=2)
    task.reset(seed=0)
    assert [task.step(np.int64(0))[2:4] for _ in range(2)] == [(False, False), (False, True)]


@pytest.mark.parametrize(
    ("changes", "kwargs", "why"),
    [
        ({}, {"trace_file": ""}, "trace_file: is missing"),
        ({}, {"mode": "guess"}, "mode='guess': must be one of matched, full, model"),
        ({"propensity": None}, {}, "mode='matched': episode 'e0' has no propensity"),
        ({}, {"mode": "full"}, "metadata.outcomes must have the result of each of action0"),
        ({"metadata": {"outcomes": [1]}}, {"mode": "full"}, "metadata.outcomes must have"),
        ({}, {"actions": ["action0"]}, "kwargs.actions: action1, action2: the log and the names differ"),
        ({}, {"numbers": ["heat"]}, "kwargs.numbers: heat"),
        ({}, {"reward": {"luck": 1}}, "reward.luck: unknown"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], kwargs: dict[str, Any], why: str
) -> None:
    path = bandit_log(tmp_path, 0, 60, **changes)
    with pytest.raises(ConfigurationError, match=why):
        TraceReplay(**({"trace_file": str(path)} | kwargs))
