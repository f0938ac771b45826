"""Which fragments are trained on: what breaks a space or means nothing is refused by name."""

from typing import Any

import numpy as np
import pytest

from penstock.learner.batch import check_meaning
from penstock.policy.policy import Policy
from penstock.protocol.schema import Ranges
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from penstock.runtime import metrics
from tests.support.experience.experience import Collector, Fragment, cartpoles, small_policy
from tests.support.experience.remembering import Actor, remembering

NOTHING = Dict(())


def good() -> Fragment:
    """One fragment with a truncated step."""
    return Collector(cartpoles(2, max_episode_steps=4)).fragment(small_policy(), 6)


def of(policy: Policy) -> Ranges:
    """Those of a policy's run."""
    return Ranges.of_run(policy.observation_space, policy.action_space, policy.state_space)


def test_a_good_fragment_passes() -> None:
    header, arrays = good()
    check_meaning(header, arrays)
    reward, valid = arrays["reward"].copy(), arrays["valid"].copy()
    reward[0, 0], valid[0, 0] = np.nan, False
    check_meaning(header, arrays | {"reward": reward, "valid": valid})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward", np.nan, "reward: holds NaN"),
        ("log_prob", np.inf, "log_prob: holds NaN or infinity"),
        ("observation", np.nan, "observation: holds NaN"),
        ("final/observation", -np.inf, "final/observation: holds NaN"),
        ("final/slot", 2, "points outside"),
        ("final/step", -1, "points outside"),
        ("final/step", 0, "ended no episode"),
        ("truncated", True, "missing for a truncated step"),
    ],
)
def test_a_fragment_that_means_nothing_is_refused(name: str, value: float, message: str) -> None:
    header, arrays = good()
    changed = arrays[name].copy()
    changed.flat[0] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays | {name: changed})


@pytest.mark.promise("tensor-held-against-space")
@pytest.mark.parametrize("space", [Discrete(2), MultiDiscrete((2, 3)), MultiBinary(2)])
def test_a_choice_of_a_probability_above_1_is_refused(space: Space) -> None:
    header, arrays = Collector(cartpoles(2)).fragment(small_policy(), 6)
    log_prob = arrays["log_prob"].copy()
    log_prob[3, 1] = 1e-6
    tensors = {name: array for name, array in arrays.items() if name != "action"}
    ranges = Ranges.of_run(WIDE, space, NOTHING)
    check_meaning(header, tensors | {"log_prob": log_prob}, ranges)
    log_prob[3, 1] = 0.01
    with pytest.raises(
        ValueError, match=r"log_prob: holds 0\.01 at step 3 of slot 1; the probability of a choice"
    ):
        check_meaning(header, tensors | {"log_prob": log_prob}, ranges)
    real = Box(np.full(1, -1, np.float32), np.full(1, 1, np.float32))
    check_meaning(header, tensors | {"log_prob": log_prob}, Ranges.of_run(WIDE, real, NOTHING))


def masked_fragment() -> Fragment:
    """Of a policy that remembers, under masks."""
    fragment = Actor(remembering(recurrent="lstm"), masked=True).fragment(6)
    return fragment.header, {name: array.copy() for name, array in fragment.arrays().items()}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mask/action", False, "mask/action: allows nothing at step 0 of slot 0"),
        ("action", 9, "mask/action: forbids the action that was taken at step"),
        ("state/actor/c", np.inf, "state/actor/c: holds NaN or infinity"),
    ],
)
def test_what_no_update_could_use_of_masks_and_state_is_refused(name: str, value: Any, message: str) -> None:
    header, arrays = masked_fragment()
    check_meaning(header, arrays)
    arrays["mask/action"][:] = [True, True, name != "action"]
    arrays[name][:] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays)


def made(seen: Space, done: Space, /, **tensors: Any) -> tuple[Any, dict[str, Any]]:
    """A good fragment of two steps in one slot, and what replaces its tensors."""
    header, arrays = Collector(cartpoles(1)).fragment(small_policy(), 2)
    rows = {"observation": 3, "action": 2}
    for name, space in (("observation", seen), ("action", done)):
        assert not isinstance(space, Dict)
        kind: Any = space
        arrays[name] = np.zeros((rows[name], 1, *kind.shape), kind.dtype)
    arrays["final/observation"] = arrays["observation"][:0, 0]
    return header, arrays | tensors


WIDE = Box(np.full(2, -np.inf, np.float32), np.full(2, np.inf, np.float32))
BYTES = Box(np.zeros(2, np.uint8), np.full(2, 9, np.uint8))
TWO = np.zeros((2, 1), np.int64)


@pytest.mark.promise("tensor-held-against-space")
@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (Discrete(16), 16, r"observation: holds 16 at \[0, 0\], outside Discrete\(n=16"),
        (Discrete(16), -1, "observation: holds -1"),
        (Discrete(3, start=-1), 2, "observation: holds 2"),
        (MultiDiscrete((2, 3)), [0, 3], r"observation: holds 3 at \[0, 0, 1\]"),
        (MultiBinary(2), [2, 0], "observation: holds 2"),
        (BYTES, [10, 0], "observation: holds 10"),
        (WIDE, [np.nan, 0], "observation: holds NaN or infinity"),
        (WIDE, [1e10, 0], r"observation: holds 1e\+10 .* outside ±1e\+09"),
        (Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32)), [1_001, 0], "observation: holds 1001"),
    ],
)
@pytest.mark.parametrize("valid", [True, False])
def test_an_observation_outside_its_space_is_refused(
    space: Space, value: Any, message: str, valid: bool
) -> None:
    header, arrays = made(space, Discrete(2), action=TWO, valid=np.full((2, 1), valid))
    ranges = Ranges.of_run(space, Discrete(2), NOTHING)
    if isinstance(space, Discrete):
        arrays["observation"] += max(space.start, 0)
    check_meaning(header, arrays, ranges)
    arrays["observation"][0, 0] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays, ranges)


@pytest.mark.promise("tensor-held-against-space")
@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (Discrete(2, start=5), 2, "action: holds 2 .* outside 2 choices"),
        (MultiDiscrete((2, 3)), [2, 0], "action: holds 2"),
        (MultiBinary(2), [0, -1], "action: holds -1"),
        (Box(np.full(1, -2, np.float32), np.full(1, 2, np.float32)), [2e9], "action: holds 2e"),
        (Box(np.full(1, -2, np.float32), np.full(1, 2, np.float32)), [np.inf], "action: holds NaN or inf"),
    ],
)
def test_an_action_that_cannot_have_been_drawn_is_refused(space: Space, value: Any, message: str) -> None:
    header, arrays = made(WIDE, space)
    ranges = Ranges.of_run(WIDE, space, NOTHING)
    check_meaning(header, arrays, ranges)
    arrays["action"][1, 0] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays, ranges)


def terminal(observation: int) -> tuple[Any, dict[str, Any]]:
    """A fragment of `Discrete(16)` whose first step terminated in a state."""
    header, arrays = made(Discrete(16), Discrete(2), action=TWO)
    arrays["observation"][:, 0] = [3, 4, 5]
    arrays["terminated"][0, 0] = True
    final = np.array([observation], np.int64)
    arrays |= {"final/slot": np.zeros(1, np.int32), "final/step": np.zeros(1, np.int32)}
    return header, arrays | {"final/observation": final}


@pytest.mark.promise("terminal-observation-outside-space")
def test_a_terminal_state_of_no_space_is_replaced_and_counted() -> None:
    ranges = Ranges.of_run(Discrete(16), Discrete(2), NOTHING)
    before = metrics.TERMINAL_OBSERVATIONS_REPLACED._value.get()
    header, arrays = terminal(15)
    assert check_meaning(header, arrays, ranges)["final/observation"].tolist() == [15]
    assert metrics.TERMINAL_OBSERVATIONS_REPLACED._value.get() == before
    header, arrays = terminal(16)
    assert check_meaning(header, arrays, ranges)["final/observation"].tolist() == [3]
    assert metrics.TERMINAL_OBSERVATIONS_REPLACED._value.get() == before + 1


def test_a_last_row_behind_a_terminated_step_is_replaced_too() -> None:
    ranges = Ranges.of_run(Discrete(16), Discrete(2), NOTHING)
    header, arrays = terminal(4)
    arrays["terminated"][:, 0] = [False, True]
    arrays["final/step"][:] = 1
    arrays["observation"][2, 0] = 16
    assert check_meaning(header, arrays, ranges)["observation"][:, 0].tolist() == [3, 4, 4]
    arrays["terminated"][:], arrays["truncated"][1] = False, True
    with pytest.raises(ValueError, match="observation: holds 16"):
        check_meaning(header, arrays, ranges)


def test_a_truncated_state_of_no_space_is_refused() -> None:
    header, arrays = terminal(16)
    arrays["truncated"][:], arrays["terminated"][:] = arrays["terminated"], False
    with pytest.raises(ValueError, match="final/observation: holds 16"):
        check_meaning(header, arrays, Ranges.of_run(Discrete(16), Discrete(2), NOTHING))


@pytest.mark.promise("tensor-held-against-space")
def test_masks_of_several_choices_are_held_against_each() -> None:
    space = MultiDiscrete((2, 3))
    mask = np.ones((3, 1, 5), bool)
    header, arrays = made(WIDE, space, **{"mask/action": mask})
    ranges = Ranges.of_run(WIDE, space, NOTHING)
    arrays["action"][1, 0] = [1, 2]
    check_meaning(header, arrays, ranges)
    mask[1, 0, 4] = False
    with pytest.raises(ValueError, match="forbids the action that was taken at step 1 of slot 0"):
        check_meaning(header, arrays, ranges)
    mask[1, 0, 2:] = False
    with pytest.raises(ValueError, match="allows nothing at step 1 of slot 0"):
        check_meaning(header, arrays, ranges)


def test_a_mask_that_allows_nothing_behind_the_last_step_is_refused() -> None:
    header, arrays = masked_fragment()
    arrays["mask/action"][-1] = False
    open_ended = ~(arrays["terminated"][-1] | arrays["truncated"][-1])
    assert open_ended.any()
    with pytest.raises(ValueError, match="allows nothing after step"):
        check_meaning(header, arrays)


@pytest.mark.parametrize("section", [{"recurrent": "lstm"}, {"recurrent": "gru"}, {"frame_stack": 3}])
def test_what_a_policy_that_remembers_sends_passes(section: dict[str, Any]) -> None:
    policy = remembering(**section)
    actor = Actor(policy, masked=True)
    for steps in (1, 5, 8):
        fragment = actor.fragment(steps)
        check_meaning(fragment.header, fragment.arrays(), of(policy))
    arrays = {name: array.copy() for name, array in fragment.arrays().items()}
    name = next(name for name in arrays if name.startswith("state/") and arrays[name].dtype.kind == "f")
    arrays[name].flat[0] = 1e12
    with pytest.raises(ValueError, match=f"{name}: holds 1e"):
        check_meaning(fragment.header, arrays, of(policy))


@pytest.mark.parametrize("told", [False, True], ids=["not told", "told"])
def test_what_a_last_observation_allows_is_told_or_what_was_allowed_before_stands_in(*, told: bool) -> None:
    made = Actor(remembering(recurrent="lstm"), masked=True, final_masks=told).fragment(8)
    arrays = {name: array.copy() for name, array in made.arrays().items()}
    before = arrays["mask/action"][arrays["final/step"], arrays["final/slot"]]
    assert len(before) > 1
    assert ("final/mask/action" in arrays) == told
    expected = before
    if told:
        arrays["final/mask/action"][0] = False
        expected = arrays["final/mask/action"].copy()
        expected[0] = before[0]
        assert not np.array_equal(expected, before)
    checked = check_meaning(made.header, arrays)
    assert np.array_equal(checked["final/mask/action"], expected)
