"""The proof tasks have the optimum that they say, and who does not look stays far below it."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from penstock.workloads.control.tasks import STEP_COST


def played(environment: gymnasium.Env[Any, Any], act: Any, episodes: int) -> list[float]:
    """Returns of episodes with seeds from 0."""
    returns = []
    for seed in range(episodes):
        observation, _ = environment.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = environment.step(act(observation))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def catch(image: Any) -> int:
    """Go under the ball."""
    ball, paddle = int(image[:-1].any(0).argmax()), int(image[-1].argmax())
    return 1 + int(np.sign(ball - paddle))


def deliver(seen: dict[str, Any]) -> int:
    """Rows first."""
    row, column = seen["position"]
    to_row, to_column = divmod(int(seen["depot"]), 2)
    if row != 4 * to_row:
        return int(row < 4 * to_row)
    return 2 + int(column < 4 * to_column)


def distance(seen: dict[str, Any]) -> float:
    """Steps to the depot."""
    to_row, to_column = divmod(int(seen["depot"]), 2)
    return abs(float(seen["position"][0]) - 4 * to_row) + abs(float(seen["position"][1]) - 4 * to_column)


@pytest.mark.parametrize("name", ["Catch-v0", "Courier-v0"])
def test_they_are_environments_as_gymnasium_wants_them(name: str) -> None:
    check_env(gymnasium.make(name).unwrapped, skip_render_check=True)


def test_every_ball_can_be_caught() -> None:
    environment = gymnasium.make("Catch-v0")
    assert set(played(environment, catch, 100)) == {1.0}
    assert environment.spec is not None
    assert environment.spec.reward_threshold == 0.95


def test_who_does_not_look_catches_one_ball_in_ten() -> None:
    returns = played(gymnasium.make("Catch-v0"), lambda _: 1, 2000)
    assert np.mean(returns) == pytest.approx(-0.8, abs=0.05)


def test_the_shortest_way_to_a_depot_is_the_optimum() -> None:
    environment = gymnasium.make("Courier-v0")
    distances = [distance(environment.reset(seed=seed)[0]) for seed in range(2000)]
    returns = played(environment, deliver, 2000)
    np.testing.assert_allclose(returns, 1.0 - STEP_COST * np.array(distances), atol=1e-9)
    assert min(distances) == 1
    assert np.mean(returns) == pytest.approx(7 / 12, abs=0.02)


def test_a_random_walk_rarely_finds_the_depot() -> None:
    random = np.random.default_rng(0)
    returns = played(gymnasium.make("Courier-v0"), lambda _: int(random.integers(4)), 500)
    assert np.mean(returns) < -0.5
