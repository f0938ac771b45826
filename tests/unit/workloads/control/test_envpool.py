"""EnvPool's environments are Gymnasium's, step by step, and their ends are told as Gymnasium tells them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from penstock.actor.acting.stepper import Stepped, Stepper
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.spaces import Box, Dict, leaves
from penstock.workloads.control import environment as control
from penstock.workloads.control.envpool_tasks import longest

envpool: Any = pytest.importorskip("envpool", reason="EnvPool is an extra")
SLOTS = 5
SEEDS = [1, 2**31 + 5, 3, 2**32 - 1, 4]


def stepper(environment_id: str = "CartPole-v1", count: int = SLOTS, **changes: Any) -> Stepper:
    """EnvPool's, as an actor steps them."""
    section = EnvironmentSection(id=environment_id, vectorise="envpool", **changes)
    return Stepper(control.make(section, count, 0), control.spaces(section)[0])


def last_seen(stepped: Stepped) -> Any:
    """What each slot observed, at its end where its episode has ended."""
    last = stepped.observation["observation"].copy()
    if stepped.ended is not None:
        last[stepped.ended.slots] = stepped.ended.observation["observation"]
    return last


def same(state: Any) -> Any:
    """What is seen is the state."""
    return state


def pendulum(seen: Any) -> Any:
    return np.array([np.arctan2(seen[1], seen[0]), seen[2]])


def acrobot(seen: Any) -> Any:
    return np.array([np.arctan2(seen[1], seen[0]), np.arctan2(seen[3], seen[2]), seen[4], seen[5]])


@pytest.mark.parametrize(
    ("environment_id", "steps", "state_of"),
    [
        ("CartPole-v1", 600, same),
        ("MountainCar-v0", 450, same),
        ("MountainCarContinuous-v0", 1050, same),
        ("Pendulum-v1", 450, pendulum),
        ("Acrobot-v1", 1050, acrobot),
    ],
)
def test_every_step_equals_gymnasiums(
    environment_id: str, steps: int, state_of: Callable[[Any], Any]
) -> None:
    pool = stepper(environment_id)
    by_hand = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    reference: Any = gymnasium.make_vec(environment_id, SLOTS, "sync", vector_kwargs=by_hand)
    reference.action_space.seed(0)
    reference.reset(seed=0)
    seen, ends, compared = pool.reset(SEEDS)["observation"], 0, 0
    for _ in range(steps):
        for single, shown in zip(reference.envs, seen, strict=True):
            single.unwrapped.state = state_of(np.asarray(shown, np.float64))
        actions = reference.action_space.sample()
        stepped = pool.step(actions)
        expected, reward, terminated, truncated, _ = reference.step(actions)
        assert stepped.valid is None, "no step without experience"
        last = last_seen(stepped)
        if stepped.ended is not None:
            ends += len(stepped.ended.slots)
            reference.reset(options={"reset_mask": terminated | truncated})
        bounded = np.abs(expected[:, -1]) >= (8.0 if environment_id == "Pendulum-v1" else np.inf)
        np.testing.assert_allclose(last[~bounded], expected[~bounded], atol=2e-5)
        compared += int((~bounded).sum())
        np.testing.assert_allclose(stepped.reward, reward, atol=2e-5)
        np.testing.assert_array_equal(stepped.terminated, terminated)
        np.testing.assert_array_equal(stepped.truncated, truncated)
        seen = stepped.observation["observation"]
    assert ends >= SLOTS
    assert compared > 0.8 * steps * SLOTS
    pool.close()


@pytest.mark.parametrize("environment_id", ["InvertedPendulum-v5", "Hopper-v5", "Walker2d-v5"])
def test_mujoco_steps_equal_gymnasiums(environment_id: str) -> None:
    pytest.importorskip("mujoco", reason="Gymnasium's own needs the extra mujoco")
    pytest.importorskip("imageio", reason="Gymnasium's own needs the extra mujoco")
    pool = stepper(environment_id)
    singles: list[Any] = [gymnasium.make(environment_id) for _ in range(SLOTS)]
    seen = pool.reset(SEEDS)["observation"]

    def begin(single: Any, shown: Any) -> None:
        hidden = single.unwrapped.model.nq + single.unwrapped.model.nv - len(shown)  # the way it has come
        whole = np.concatenate([np.zeros(hidden), shown])
        single.reset()
        single.unwrapped.set_state(*np.split(whole, [single.unwrapped.model.nq]))

    for single, shown in zip(singles, seen, strict=True):
        begin(single, shown)
    singles[0].action_space.seed(0)
    for _ in range(60):
        actions = np.stack([singles[0].action_space.sample() for _ in singles])
        stepped = pool.step(actions)
        last = last_seen(stepped)
        for slot, single in enumerate(singles):
            expected, reward, terminated, truncated, _ = single.step(actions[slot])
            np.testing.assert_allclose(last[slot], expected, atol=1e-3)
            assert stepped.reward[slot] == pytest.approx(reward, abs=1e-3)
            assert (stepped.terminated[slot], stepped.truncated[slot]) == (terminated, truncated)
            if terminated or truncated:
                begin(single, stepped.observation["observation"][slot])
    pool.close()


def test_an_end_in_the_last_step_of_the_limit_is_terminal_too() -> None:
    pool = stepper(count=1)
    pool.reset([7])
    length = 1
    while not pool.step(np.zeros(1, np.int64)).terminated[0]:
        length += 1
    limited = stepper(count=1, max_episode_steps=length)
    limited.reset([7])
    last = [limited.step(np.zeros(1, np.int64)) for _ in range(length)][-1]
    assert last.terminated.tolist() == [True]
    assert last.truncated.tolist() == [True]


def test_all_environments_may_end_at_once_and_at_the_first_step() -> None:
    pool = stepper("Pendulum-v1", max_episode_steps=1)
    shown = [pool.reset(SEEDS)["observation"]]
    for _ in range(3):
        stepped = pool.step(np.zeros((SLOTS, 1), np.float32))
        assert stepped.truncated.all()
        assert not stepped.terminated.any()
        assert stepped.begins is not None
        assert stepped.begins.all()
        shown.append(stepped.observation["observation"])
        assert not np.array_equal(last_seen(stepped), shown[-1])
    assert len(np.unique(np.concatenate(shown), axis=0)) == 4 * SLOTS


@pytest.mark.parametrize(("count", "threads"), [(1, 4), (7, 3)])
def test_threads_change_nothing(count: int, threads: int) -> None:
    by_one = stepper(count=count, kwargs={"num_threads": 1})
    by_some = stepper(count=count, kwargs={"num_threads": threads})
    seeds = [*SEEDS, 8, 9][:count]
    np.testing.assert_array_equal(*[one.reset(seeds)["observation"] for one in (by_one, by_some)])
    for step in range(100):
        actions = np.arange(count) + step & 1
        one, other = by_one.step(actions), by_some.step(actions)
        np.testing.assert_array_equal(one.observation["observation"], other.observation["observation"])
        np.testing.assert_array_equal(one.terminated, other.terminated)


def test_each_slot_has_its_own_seed_and_the_same_seed_repeats_it() -> None:
    pool = stepper()

    def run(seeds: list[int]) -> Any:
        shown = [pool.reset(seeds)["observation"]]
        shown += [pool.step(np.zeros(SLOTS, np.int64)).observation["observation"] for _ in range(30)]
        return np.stack(shown, 1)

    first = run(SEEDS)
    np.testing.assert_array_equal(first, run(SEEDS))
    assert len(np.unique(first[:, 0], axis=0)) == SLOTS
    swapped = run(SEEDS[::-1])
    np.testing.assert_array_equal(first[::-1], swapped)
    with_large = run([2**63, *SEEDS[1:]])
    np.testing.assert_array_equal(first[1:], with_large[1:])
    environment = control.make(EnvironmentSection(vectorise="envpool"), 2, 0)
    assert not np.array_equal(*(environment.reset()[0] for _ in range(2)))
    np.testing.assert_array_equal(*(environment.reset(seed=3)[0] for _ in range(2)))


def test_no_later_step_writes_into_earlier_observations() -> None:
    pool = stepper()
    kept = [pool.reset(SEEDS)["observation"]]
    copies = [kept[0].copy()]
    for _ in range(60):
        kept.append(pool.step(np.ones(SLOTS, np.int64)).observation["observation"])
        copies.append(kept[-1].copy())
    np.testing.assert_array_equal(np.stack(kept), np.stack(copies))


CLASSIC = ["CartPole-v0", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
TEXT = ["Acrobot-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1"]
ROBOTS = ("Ant", "HalfCheetah", "Hopper", "Humanoid", "InvertedPendulum", "Reacher", "Swimmer", "Walker2d")
MUJOCO = [f"{name}-{version}" for name in ROBOTS for version in ("v4", "v5")]


@pytest.mark.parametrize("environment_id", [*CLASSIC, *TEXT, *MUJOCO])
def test_a_policy_of_one_can_be_read_by_the_other(
    environment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment_id in MUJOCO:
        pytest.importorskip("mujoco", reason="Gymnasium's own needs the extra mujoco")
        pytest.importorskip("imageio", reason="Gymnasium's own needs the extra mujoco")
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes what it warns of
    pool, loop = (EnvironmentSection(id=environment_id, vectorise=way) for way in ("envpool", "sync"))
    assert control.spaces(pool) == control.spaces(loop)
    assert longest(pool) == gymnasium.spec(environment_id).max_episode_steps
    assert control.target(pool) == control.target(loop)


def test_an_id_that_only_envpool_has_is_shown_by_path() -> None:
    section = EnvironmentSection(id="MiniGrid-Empty-5x5-v0", vectorise="envpool")
    space, _ = control.spaces(section)
    assert isinstance(space, Dict)
    pool = stepper(section.id, count=3)
    pool.reset([1, 2, 3])
    random, ends = np.random.default_rng(0), 0
    for _ in range(200):
        stepped = pool.step(random.integers(0, 3, 3))
        assert {path: rows.shape for path, rows in stepped.observation.items()} == {
            path: (3, *leaf.shape) for path, leaf in leaves(space, "observation")
        }
        ends += 0 if stepped.ended is None else len(stepped.ended.slots)
    assert ends >= 3
    assert longest(section) == 100


def test_unknown_bounds_are_none_and_arguments_reach_it() -> None:
    space, _ = control.spaces(EnvironmentSection(id="WalkerWalk-v1", vectorise="envpool"))
    parts: list[Any] = [leaf for _, leaf in leaves(space, "observation")]
    assert parts
    assert all((one.low == -np.inf).all() and (one.high == np.inf).all() for one in parts)
    whole: dict[str, Any] = {"exclude_current_positions_from_observation": False}
    space, _ = control.spaces(EnvironmentSection(id="HalfCheetah-v5", vectorise="envpool", kwargs=whole))
    assert isinstance(space, Box)
    assert space.shape == (18,)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"id": "CartPol-v1"}, r"'CartPol-v1' is none of EnvPool's.*did you mean CartPole-v1.*use 'auto'"),
        ({"id": "mine:CartPole-v1"}, r"'mine:CartPole-v1' is none of EnvPool's"),
        ({"id": "Blackjack-v1"}, r"Blackjack-v1 has observation_space=Box.*in EnvPool and Tuple.*use 'sync'"),
        ({"id": "TicTacToe-v1"}, r"'TicTacToe-v1' has several players"),
        ({"id": "Pong-v5"}, r"'Pong-v5'.*write 'ALE/Pong-v5'"),
        ({"kwargs": {"num_envs": 3}}, r"kwargs\.num_envs=3.*vectorise='envpool'; set environment\.count"),
        ({"kwargs": {"seed": 3}}, r"kwargs\.seed=3.*vectorise='envpool'; set seed"),
        ({"kwargs": {"batch_size": 1}}, r"kwargs\.batch_size=1.*vectorise='envpool'; leave it out"),
        ({"kwargs": {"colour": 1}}, r"environment\.kwargs=\{'colour': 1\}.*colour.*use 'auto'"),
        ({"kwargs": {"num_threads": "two"}}, r"environment\.kwargs=\{'num_threads': 'two'\}.*cannot be made"),
        ({"id": "Pendulum-v1", "kwargs": {"g": 3.0}}, r"kwargs=\{'g': 3\.0\}.*cannot be made"),
        ({"atari": {}}, r"environment\.atari.*'CartPole-v1' is no Atari game"),
    ],
)
def test_settings_that_envpool_does_not_support_are_named(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        control.target(EnvironmentSection(**section, vectorise="envpool"))
