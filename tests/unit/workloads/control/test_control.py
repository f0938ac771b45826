import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from penstock.actor.acting.masks import Masks
from penstock.actor.acting.stepper import Stepper
from penstock.config import settings
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.config.workload import find, load, module_of
from penstock.learner.model import make_model
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from penstock.workloads.control.atari import EpisodicLife, StepLimit
from penstock.workloads.control.environment import make, spaces, target, to_space
from penstock.workloads.control.tasks import STEP_COST
from tests.support.experience.counting_environments import Counting
from tests.support.experience.held_memory import FIRST, LATER, LENGTH, TASK
from tests.support.experience.held_memory import WAYS as HELD_MEMORY_WAYS

WAYS: list[Any] = ["auto", "sync", "async", "vector", "envpool"]


@pytest.fixture
def counting() -> Iterator[str]:
    name = "Counting-v7"
    gymnasium.register(name, lambda **_: Counting(0), max_episode_steps=50, reward_threshold=12)
    yield name
    gymnasium.registry.pop(name)


@pytest.mark.parametrize(
    ("section", "kind", "mode"),
    [
        ({"vectorise": "auto"}, CartPoleVectorEnv, AutoresetMode.NEXT_STEP),
        ({"vectorise": "vector"}, CartPoleVectorEnv, AutoresetMode.NEXT_STEP),
        ({"vectorise": "sync"}, SyncVectorEnv, AutoresetMode.DISABLED),
        ({"vectorise": "async"}, AsyncVectorEnv, AutoresetMode.NEXT_STEP),
        ({"id": "Acrobot-v1"}, SyncVectorEnv, AutoresetMode.DISABLED),
    ],
)
def test_the_vectoriser_is_chosen(section: dict[str, Any], kind: type, mode: AutoresetMode) -> None:
    with closing(make(EnvironmentSection(**section), 3, 0)) as environment:
        assert isinstance(environment, kind)
        assert environment.num_envs == 3
        assert environment.metadata["autoreset_mode"] is mode
        if isinstance(environment, AsyncVectorEnv):
            assert environment.context == "spawn"
            environment.reset(seed=[1, 2, 3])
            environment.step(np.zeros(3, np.int64))


def test_the_time_limit_and_arguments_reach_the_environment() -> None:
    for vectorise in ("sync", "vector"):
        section = EnvironmentSection(vectorise=vectorise, max_episode_steps=1)
        with closing(make(section, 2, 0)) as environment:
            environment.reset(seed=0)
            assert environment.step(np.zeros(2, np.int64))[3].tolist() == [True, True]
    with closing(make(EnvironmentSection(id="Pendulum-v1", kwargs={"g": 3.0}), 1, 0)) as single:
        assert isinstance(single, SyncVectorEnv)
        assert single.get_attr("g") == (3.0,)


def test_spaces_and_target_are_those_of_the_environment(counting: str) -> None:
    observation, action = spaces(EnvironmentSection())
    assert isinstance(observation, Box)
    assert (observation.shape, observation.dtype) == ((4,), "float32")
    assert action == Discrete(2)
    assert target(EnvironmentSection()) == 475
    assert target(EnvironmentSection(id=counting)) == 12
    assert target(EnvironmentSection(id="Pendulum-v1")) is None


@pytest.mark.parametrize("name", ["Catch-v0", "Menu-v0", "Goals-v0", "Chat-v0", "Prompts-v0"])
def test_built_in_environments_need_no_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gymnasium.registry, name, raising=False)
    monkeypatch.delitem(sys.modules, module_of(name), raising=False)
    section = EnvironmentSection(id=name, mask_key="action_mask" if name == "Menu-v0" else "")
    with closing(make(section, 1, 0)) as made:
        assert made.reset(seed=0)[0] is not None


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"id": "CartPol-v1"}, r"environment\.id='CartPol-v1'.*did you mean CartPole-v1"),
        ({"id": "CartPole-v9"}, r"environment\.id='CartPole-v9'.*CartPole-v1"),
        ({"id": "Quuxquuxquux-v0"}, r"environment\.id='Quuxquuxquux-v0'.*module:Id"),
        ({"id": "no_such_module:Foo-v1"}, r"no_such_module.*install"),
        ({"id": "workloads.goals.tasks:Goals-v0"}, "it is 'Goals-v0'$"),
        ({"kwargs": {"colour": 1}}, r"environment\.kwargs=\{'colour': 1\}.*colour"),
        ({"id": "Acrobot-v1", "vectorise": "vector"}, r"vectorise='vector'.*use 'auto' or 'sync'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(EnvironmentSection(**section), 1, 0)


@pytest.mark.parametrize(
    ("section", "package", "words"),
    [
        ({"vectorise": "envpool"}, "envpool", r"vectorise='envpool'.*penstock-rl\[envpool\].*use 'auto'"),
        ({"id": "ALE/Pong-v5"}, "ale_py", r"environment\.id='ALE/Pong-v5'.*penstock-rl\[atari\]"),
    ],
)
def test_an_absent_package_is_named_with_its_extra(
    section: dict[str, Any], package: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=words):
        target(EnvironmentSection(**section))


def test_an_evaluation_plays_whole_games_with_a_seed_for_each() -> None:
    ways = {way: EnvironmentSection(vectorise=way).for_evaluation().vectorise for way in WAYS}
    assert ways == {"auto": "sync", "sync": "sync", "async": "sync", "vector": "vector", "envpool": "envpool"}
    game = EnvironmentSection(id="ALE/Pong-v5", atari={"frame_skip": 2}).for_evaluation()  # type: ignore[arg-type]
    assert game.atari is not None
    assert (game.atari.episodic_life, game.atari.frame_skip) == (False, 2)


def test_spaces_are_described_as_data() -> None:
    given = gymnasium.spaces.Dict(
        box=gymnasium.spaces.Box(-1, 1, (2,), np.float64),
        pair=gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(3, start=5), gymnasium.spaces.MultiBinary(4))),
        many=gymnasium.spaces.MultiDiscrete([2, 3]),
    )
    assert to_space("observation_space", given) == Dict(
        (
            ("box", Box(np.full(2, -1.0), np.full(2, 1.0))),
            ("pair", Tuple((Discrete(3, 5), MultiBinary(4)))),
            ("many", MultiDiscrete((2, 3))),
        )
    )


NUMBERED: Any = [(1, gymnasium.spaces.Discrete(2))]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gymnasium.spaces.Text(5), r"action_space=Text.*use Box"),
        (gymnasium.spaces.Dict(inner=gymnasium.spaces.Text(5)), r"action_space/inner=Text"),
        (gymnasium.spaces.MultiDiscrete(np.array([[2, 3]])), r"one axis"),
        (gymnasium.spaces.Dict({"a/b": gymnasium.spaces.Discrete(2)}), r"'a/b'.*rename"),
        (gymnasium.spaces.Dict(NUMBERED), r"key 1 is no text.*rename"),
        (gymnasium.spaces.Box(-1, 1, (60_000, 1000)), r"has 240000000 bytes, a message holds 8388608"),
    ],
)
def test_an_unsupported_space_is_named(space: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        to_space("action_space", space)


@pytest.mark.parametrize("algorithm", ["ppo", "impala", "reinforce"])
@pytest.mark.parametrize(
    "environment_id", ["CartPole-v1", "mine:Thing-v0", "ALE/Pong-v5", "Pendulum-v1", "HalfCheetah-v5"]
)
def test_defaults_are_valid_settings_for_any_environment_and_algorithm(
    environment_id: str, algorithm: str
) -> None:
    layer = load(find("control").defaults)(environment_id, algorithm)
    made = settings.load([layer, {"environment": {"id": environment_id}, "algorithm": {"name": algorithm}}])
    assert made.environment.id == environment_id
    assert made.learner.total_steps is not None
    full = made.actor.unroll_length * made.environment.count
    assert isinstance(made.algorithm, settings.OnPolicySection)
    assert (made.algorithm.staleness + 1) * made.algorithm.batch_steps >= full
    if environment_id == "CartPole-v1":
        assert full <= made.algorithm.batch_steps
        assert algorithm != "ppo" or full * made.actor.count == made.algorithm.batch_steps


@pytest.mark.parametrize(
    ("environment_id", "known", "algorithm"),
    [
        *((name, name, "dqn") for name in ("CartPole-v1", "MountainCar-v0", "Acrobot-v1")),
        ("mine:Thing-v0", "Acrobot-v1", "dqn"),
        *((name, "Pendulum-v1", "sac") for name in ("Pendulum-v1", "mine:Thing-v0")),
    ],
)
def test_defaults_of_replay_are_admitted_by_the_rate_limiter(
    environment_id: str, known: str, algorithm: str
) -> None:
    layer = load(find("control").defaults)(environment_id, algorithm)
    made = settings.load([layer, {"environment": {"id": known}, "algorithm": {"name": algorithm}}])
    model = make_model(made)
    assert model.pacing.budget >= 2 * made.actor.unroll_length * made.environment.count
    assert model.algorithm.stale_after is None


class Inside(Counting):
    def __init__(self) -> None:
        super().__init__(0)
        count: Any = self.observation_space
        self.observation_space = gymnasium.spaces.Dict(count=count, mask=gymnasium.spaces.MultiBinary(2))

    def _observe(self) -> Any:
        return {"count": super()._observe(), "mask": np.ones(2, np.int8)}


def test_the_part_of_an_observation_that_is_the_mask_is_not_shown() -> None:
    gymnasium.register("Inside-v7", lambda **_: Inside())
    try:
        shown, _ = spaces(EnvironmentSection(id="Inside-v7", mask_key="mask"))
        assert isinstance(shown, Dict)
        assert [key for key, _ in shown.spaces] == ["count"]
        whole, _ = spaces(EnvironmentSection(id="Inside-v7"))
        assert isinstance(whole, Dict)
        assert len(whole.spaces) == 2
    finally:
        gymnasium.registry.pop("Inside-v7")


def test_the_stated_optimum_of_each_task_is_right() -> None:
    recall: Any = gymnasium.make("penstock.workloads.control.tasks:Recall-v0")
    for seed in range(20):
        cue, total, over, steps = int(recall.reset(seed=seed)[0].argmax()), 0.0, False, 0
        while not over:
            _, reward, over, _, _ = recall.step(cue)
            total, steps = total + reward, steps + 1
        assert total == 1
        assert 7 <= steps <= 13
    menu: Any = gymnasium.make("penstock.workloads.control.tasks:Menu-v0")
    total = 0.0
    for seed in range(300):
        mood, info = menu.reset(seed=seed)
        over = False
        while not over:
            ranks = np.arange(6) if mood == 0 else np.arange(6)[::-1]
            mood, reward, over, _, info = menu.step(np.where(info["action_mask"], ranks, -1).argmax())
            total += reward
    expected = 10 * sum(i * 2**i for i in range(6)) / 63 / 5
    assert expected == pytest.approx(8.19, abs=0.005)
    assert total / 300 == pytest.approx(expected, abs=0.15)


class Lives(gymnasium.Env[Any, Any]):
    """Three lives; action 1 loses one, and the game is over without the last. Shows its steps."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
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


def test_a_lost_life_ends_an_episode_without_a_reset() -> None:
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
    rule.reset(seed=0)
    assert rule.step(np.array([0, 0]))[2].tolist() == [False, False], "a new game has all lives"


def test_steps_are_counted_from_each_reset_and_the_last_may_terminate_and_truncate() -> None:
    rule = StepLimit(games(2), 4)
    rule.reset(seed=0)
    rule.step(np.array([0, 0]))
    rule.reset(options={"reset_mask": np.array([True, False])})
    told = [rule.step(np.array([0, 0]))[3].tolist() for _ in range(4)]
    assert told == [[False, False], [False, False], [False, True], [True, True]]
    rule.reset(seed=0)
    told = [rule.step(np.array([number > 0, 0])) for number in range(4)]
    assert told[-1][2].tolist() == [True, False]
    assert told[-1][3].tolist() == [True, True]


def played(environment: gymnasium.Env[Any, Any], act: Any, episodes: int) -> list[float]:
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
    ball, paddle = int(image[:-1].any(0).argmax()), int(image[-1].argmax())
    return 1 + int(np.sign(ball - paddle))


def deliver(seen: dict[str, Any]) -> int:
    row, column = seen["position"]
    to_row, to_column = divmod(int(seen["depot"]), 2)
    if row != 4 * to_row:
        return int(row < 4 * to_row)
    return 2 + int(column < 4 * to_column)


def distance(seen: dict[str, Any]) -> float:
    to_row, to_column = divmod(int(seen["depot"]), 2)
    return abs(float(seen["position"][0]) - 4 * to_row) + abs(float(seen["position"][1]) - 4 * to_column)


def test_every_ball_can_be_caught_and_who_does_not_look_catches_one_in_ten() -> None:
    environment = gymnasium.make("Catch-v0")
    check_env(environment.unwrapped, skip_render_check=True)
    assert set(played(environment, catch, 100)) == {1.0}
    assert environment.spec is not None
    assert environment.spec.reward_threshold == 0.95
    assert np.mean(played(environment, lambda _: 1, 2000)) == pytest.approx(-0.8, abs=0.05)


def test_the_shortest_way_to_a_depot_is_the_optimum() -> None:
    environment = gymnasium.make("Courier-v0")
    check_env(environment.unwrapped, skip_render_check=True)
    distances = [distance(environment.reset(seed=seed)[0]) for seed in range(2000)]
    returns = played(environment, deliver, 2000)
    np.testing.assert_allclose(returns, 1.0 - STEP_COST * np.array(distances), atol=1e-9)
    assert min(distances) == 1
    assert np.mean(returns) == pytest.approx(7 / 12, abs=0.02)
    random = np.random.default_rng(0)
    assert np.mean(played(environment, lambda _: int(random.integers(4)), 500)) < -0.5


SLOTS = 3


def held(**arguments: Any) -> tuple[Stepper, list[Any]]:
    """Slots by default settings, and their environments."""
    section = EnvironmentSection(id=TASK, kwargs=arguments, mask_key="mask")
    environment = make(section, SLOTS, 0)
    assert isinstance(environment, SyncVectorEnv)
    stepper = Stepper(environment, spaces(section)[0], Masks("mask", Discrete(2), SLOTS))
    return stepper, [one.unwrapped for one in environment.envs]


@pytest.mark.promise("last-observation-episode-mask")
@pytest.mark.parametrize("mask", ["array", "list"])
@pytest.mark.parametrize("way", HELD_MEMORY_WAYS)
def test_a_last_observation_and_its_mask_are_not_those_of_the_next_episode(way: str, mask: str) -> None:
    stepper, _ = held(way=way, mask=mask)
    actions, ends = np.ones(SLOTS, np.int64), 0
    shown = stepper.reset(range(SLOTS))
    for step in range(1, 3 * LENGTH + 1):
        is_first = step % LENGTH == 1
        assert all((rows == (FIRST if is_first else LATER)).all() for rows in shown.values()), step
        stepped = stepper.step(actions)
        shown = stepped.observation
        if stepped.ended is not None:
            assert len(stepped.ended.observation) == 2
            assert all((rows == LATER).all() for rows in stepped.ended.observation.values())
            ends += len(stepped.ended.slots)
    assert ends == 3 * SLOTS


@pytest.mark.parametrize("way", HELD_MEMORY_WAYS)
def test_observations_of_a_slot_are_not_those_of_the_next_one(way: str) -> None:
    stepper, environments = held(way=way)
    stepper.reset(range(SLOTS))
    for slot, one in enumerate(environments):
        one.observes = np.full(2, (slot + 1) / SLOTS, np.float32)
    expected = np.arange(1, SLOTS + 1, dtype=np.float32) / SLOTS
    for _ in range(LENGTH):
        stepped = stepper.step(np.ones(SLOTS, np.int64))
        last = stepped.ended
        rows = stepped.observation if last is None else last.observation
        (path,) = (path for path in rows if "mask" not in path)
        assert np.array_equal(rows[path], np.repeat(expected[:, None], 2, 1))


def test_no_attribute_of_an_environment_is_read_before_the_first_reset() -> None:
    stepper, environments = held()
    assert [one.calls for one in environments] == [[]] * SLOTS
    stepper.reset(range(SLOTS))
    for _ in range(LENGTH):
        stepper.step(np.ones(SLOTS, np.int64))
    expected = [("reset", None), *[("step", 1)] * LENGTH, ("reset", None)]
    assert [one.calls for one in environments] == [expected] * SLOTS
