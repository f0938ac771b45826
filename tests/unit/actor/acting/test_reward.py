"""The learner's rewards equal numbers worked out by hand, and returns stay the environment's own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from penstock.actor.acting.masks import LearnerReward, PotentialError, learner_reward, potentials
from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.config.sections import EnvironmentSection, RewardWrapper
from penstock.config.settings import ConfigurationError
from penstock.config.trusted import check_trusted
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.protocol.tensor import Array
from tests.support.experience.counting_environments import NESTED, OBSERVATION, vector

HERE = __name__
DISCOUNT = 0.5
STEPS = 7


def progress(observation: Mapping[str, Array]) -> Array:
    """Φ = 10 · step: the last of the three numbers that a counting environment shows."""
    rows = observation["observation"] if "observation" in observation else observation["observation/count"]
    return np.multiply(10.0, rows[:, 2])


def not_a_number(observation: Mapping[str, Array]) -> Array:
    """What no potential may be."""
    return np.full(len(observation["observation"]), np.nan)


def one_for_all(observation: Mapping[str, Array]) -> Array:
    """Not one for each."""
    return np.zeros(1)


def section(*wrappers: dict[str, Any]) -> EnvironmentSection:
    """With these wrappers."""
    return EnvironmentSection.model_validate({"reward": wrappers})


def shape(name: str = "progress") -> dict[str, Any]:
    """The potential of this module."""
    return {"shape": f"{HERE}:{name}", "discount": DISCOUNT}


def collect(
    mode: AutoresetMode, *wrappers: dict[str, Any], nested: bool = False, cuts: tuple[int, ...] = (STEPS,)
) -> tuple[list[Fragment], list[Episode]]:
    """Counting environments, in which odd episodes are truncated.

    The episodes of slot 0 have 3, 1, 4 and 2 steps, those of slot 1 have 1, 4, 2 and 3.
    """
    space = NESTED if nested else OBSERVATION
    stepper = Stepper(vector(mode, 2, nested=nested), space)
    schema = fragment_schema(space, Discrete(2))
    builder = FragmentBuilder(schema, STEPS, 2, reward=learner_reward(section(*wrappers)))
    builder.start(stepper.reset([0, 0]))
    fragments, episodes = [], []
    for sequence, length in enumerate(cuts, 1):
        for _ in range(length):
            action = np.zeros(2, np.int64)
            builder.record({"action": action}, np.zeros(2, np.float32), stepper.step(action))
        fields = HeaderFields(run="run-a", session=1, sequence=sequence, weights=Publication(1, 0), round=0)
        fragment, ended = builder.cut(fields)
        fragments.append(fragment)
        episodes += ended
    return fragments, episodes


def rewards(fragments: list[Fragment]) -> list[list[float]]:
    """Of the valid steps, by slot."""
    arrays: list[dict[str, Any]] = [fragment.arrays() for fragment in fragments]
    reward = np.concatenate([one["reward"] for one in arrays])
    valid = np.concatenate([one["valid"] for one in arrays])
    assert (reward[~valid] == 0).all()
    return [reward[valid[:, slot], slot].tolist() for slot in range(2)]


TRUE = [[1, 2, 3, 101, 201, 202, 203], [1, 101, 102, 103, 104, 201, 202]]


@pytest.mark.promise("reward-wrappers-change-rewards")
def test_clip_and_scale_change_the_rewards_in_the_order_in_which_they_are_named() -> None:
    same = AutoresetMode.SAME_STEP
    assert rewards(collect(same)[0]) == TRUE
    first = rewards(collect(same, {"clip": [2, 102]}, {"scale": 0.1})[0])
    tenths = [[0.2, 0.2, 0.3, 10.1, 10.2, 10.2, 10.2], [0.2, 10.1, 10.2, 10.2, 10.2, 10.2, 10.2]]
    assert first == [[float(np.float32(r)) for r in slot] for slot in tenths]
    other = rewards(collect(same, {"scale": 0.1}, {"clip": [2, 102]})[0])
    last = [[2, 2, 2, 10.1, 20.1, 20.2, 20.3], [2, 10.1, 10.2, 10.3, 10.4, 20.1, 20.2]]
    assert other == [[float(np.float32(r)) for r in slot] for slot in last]


# γΦ(s') − Φ(s) with Φ = 10·step and γ = ½, for the k-th step of an episode: 5(k + 1) − 10k = 5 − 5k; the last
# step of a terminated episode has Φ(s') = 0 and so −10k, that of a truncated one has its true last
# observation.
SHAPED = [
    [1 + 5, 2 + 0, 3 - 20, 101 + 5, 201 + 5, 202 + 0, 203 - 5],
    [1 - 0, 101 + 5, 102 + 0, 103 - 5, 104 - 10, 201 + 5, 202 - 10],
]


@pytest.mark.promise("reward-wrappers-change-rewards")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("cuts", [(7,), (3, 1, 3), (1,) * 7])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_shaping_adds_the_difference_of_potentials(
    mode: AutoresetMode, cuts: tuple[int, ...], *, nested: bool
) -> None:
    assert rewards(collect(mode, shape(), nested=nested, cuts=cuts)[0]) == SHAPED


def test_shaping_where_a_step_only_resets() -> None:
    found = rewards(collect(AutoresetMode.NEXT_STEP, shape())[0])
    assert found == [SHAPED[0][: len(found[0])], SHAPED[1][: len(found[1])]]
    assert [len(slot) for slot in found] == [5, 5]


def test_shaping_sums_to_what_telescoping_says() -> None:
    shaped = np.array(SHAPED[0][:3]) - np.array(TRUE[0][:3])
    assert (DISCOUNT ** np.arange(3) * shaped).sum() == pytest.approx(0.0)


@pytest.mark.promise("reward-wrappers-change-rewards")
@pytest.mark.parametrize("wrappers", [(), ({"scale": 0.0},), (shape(), {"clip": [-1, 1]})])
def test_returns_of_episodes_are_the_environments_own(wrappers: tuple[dict[str, Any], ...]) -> None:
    _, episodes = collect(AutoresetMode.SAME_STEP, *wrappers, cuts=(2, 5))
    assert [(one.slot_id, one.episode_return) for one in episodes] == [
        (1, 1.0), (0, 6.0), (0, 101.0), (1, 410.0), (1, 403.0),
    ]  # fmt: skip


def test_the_sum_of_float32_is_not_left() -> None:
    tensors: dict[str, Array] = {
        "reward": np.full((1, 1), 1e38, np.float32),
        "valid": np.ones((1, 1), bool),
    }
    reward = LearnerReward((RewardWrapper(scale=100.0),))(tensors)
    assert reward.tolist() == [[np.finfo(np.float32).max]]


@pytest.mark.parametrize("name", ["not_a_number", "one_for_all"])
def test_a_potential_that_gives_no_numbers_ends_the_actor(name: str) -> None:
    with pytest.raises(PotentialError, match=f"{HERE}:{name} gave .*one finite number for each"):
        collect(AutoresetMode.SAME_STEP, shape(name))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "one of clip"),
    "two": ({"clip": [0, 1], "scale": 2.0}, "one of clip"),
    "order": ({"clip": [1, 1]}, "the first number must be below the second"),
    "no module": ({"shape": "potential"}, "write module:function"),
    "discount": ({"scale": 1.0, "discount": 0.9}, "only shape has one"),
    "infinite": ({"scale": float("inf")}, "finite"),
}


@pytest.mark.parametrize(("wrapper", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_wrapper_is_one_change(wrapper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(wrapper)


def test_a_potential_is_imported_only_where_its_module_is_allowed() -> None:
    (potential,) = potentials(section(shape(), {"scale": 1.0}))
    check_trusted("environment.reward", potential, (HERE,))
    with pytest.raises(ConfigurationError, match=f"environment.reward=.*import '{HERE}'.*allow_modules"):
        check_trusted("environment.reward", potential, ())
