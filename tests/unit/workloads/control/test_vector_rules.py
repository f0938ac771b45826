"""A limit of steps and lives are rules over any vectoriser that leaves resets to its caller."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.workloads.control.atari import EpisodicLife, StepLimit


class Lives(gymnasium.Env[Any, Any]):
    """Three lives; action 1 loses one, and the game is over without the last. Shows its steps."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """To the first step of a new game."""
        self._steps, self._lives = 0, 3
        return self._shown(), {"lives": 3}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, paid one."""
        self._steps += 1
        self._lives -= int(action)
        return self._shown(), 1.0, self._lives == 0, False, {"lives": self._lives}

    def _shown(self) -> Any:
        return np.array([self._steps], np.float32)


def games(count: int) -> Any:
    """Such games, whose resets are the caller's."""
    return SyncVectorEnv([Lives] * count, autoreset_mode=AutoresetMode.DISABLED)


def test_a_lost_life_is_an_end_without_a_reset() -> None:
    rule = EpisodicLife(games(2))
    rule.reset(seed=0)
    ends = []
    for actions in ([1, 0], [0, 0], [1, 0], [1, 1]):
        _, _, terminated, truncated, _ = rule.step(np.array(actions))
        ends.append(terminated.tolist())
        assert not truncated.any()
        if terminated.any():
            shown, _ = rule.reset(options={"reset_mask": terminated})
    assert ends == [[True, False], [False, False], [True, False], [True, True]]
    assert shown.tolist() == [[0], [4]], "the first game was over, the second goes on without a life"


def test_a_new_game_has_all_lives() -> None:
    rule = EpisodicLife(games(1))
    rule.reset(seed=0)
    for _ in range(3):
        _, _, terminated, _, _ = rule.step(np.array([1]))
        rule.reset(options={"reset_mask": terminated})
    assert rule.step(np.array([1]))[2].tolist() == [True]
    rule.reset(seed=0)
    assert rule.step(np.array([0]))[2].tolist() == [False]


def test_the_last_step_may_terminate_and_truncate() -> None:
    rule = StepLimit(games(2), 3)
    rule.reset(seed=0)
    for _ in range(2):
        assert not rule.step(np.array([1, 0]))[3].any()
    _, _, terminated, truncated, _ = rule.step(np.array([1, 0]))
    assert terminated.tolist() == [True, False]
    assert truncated.tolist() == [True, True]


def test_steps_are_counted_from_each_reset() -> None:
    rule = StepLimit(games(2), 4)
    rule.reset(seed=0)
    rule.step(np.array([0, 0]))
    rule.reset(options={"reset_mask": np.array([True, False])})
    told = [rule.step(np.array([0, 0]))[3].tolist() for _ in range(4)]
    assert told == [[False, False], [False, False], [False, True], [True, True]]
