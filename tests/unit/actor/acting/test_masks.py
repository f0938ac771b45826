"""Masks reach the policy beside their observations.

This holds for every source of masks and every way in which episodes reset.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.actor.acting.masks import Masks
from penstock.actor.acting.stepper import Stepper
from penstock.protocol.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from penstock.runtime.exit import Fatal
from tests.support.experience.experience import box

SLOTS = 2
COUNT = Box(np.zeros(1, np.float32), np.full(1, 1e6, np.float32))


class Counted(gymnasium.Env[Any, Any]):
    """Observes its step; step k allows action k % 3 alone; nothing is allowed when an episode is over.

    Ends after `length` steps. inside: the mask is part of the observation. broken: a step that allows
    nothing. cut: it is cut off there, and something is allowed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    action_space = spaces.Discrete(3)

    def __init__(self, length: int, *, inside: bool = False, broken: int = -1, cut: bool = False) -> None:
        count = spaces.Box(0, 1e6, (1,), np.float32)
        whole = spaces.Dict(count=count, mask=spaces.MultiBinary(3))
        self.observation_space: Any = whole if inside else count
        self._length, self._inside, self._broken, self._cut = length, inside, broken, cut
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Step 0."""
        super().reset(seed=seed)
        self._step = 0
        return self._look(over=False)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One on."""
        self._step += 1
        over = self._step == self._length
        observation, info = self._look(over=over and not self._cut)
        return observation, 0.0, over and not self._cut, over and self._cut, info

    def _look(self, *, over: bool) -> tuple[Any, dict[str, Any]]:
        mask = np.zeros(3, np.int8)
        mask[self._step % 3] = not over and self._step != self._broken
        count = np.full(1, self._step, np.float32)
        return ({"count": count, "mask": mask}, {}) if self._inside else (count, {"mask": mask})


def stepper(mode: AutoresetMode, *, inside: bool = False, broken: int = -1, cut: bool = False) -> Stepper:
    """Slots whose episodes have 2 and 4 steps."""
    factories = [
        lambda length=length: Counted(length, inside=inside, broken=broken, cut=cut) for length in (2, 4)
    ]
    space: Space = Dict((("count", COUNT),)) if inside else COUNT
    return Stepper(SyncVectorEnv(factories, autoreset_mode=mode), space, Masks("mask", Discrete(3), SLOTS))


@pytest.mark.parametrize("inside", [False, True], ids=["info", "observation"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_mask_belongs_to_the_observation_beside_it(mode: AutoresetMode, *, inside: bool) -> None:
    made = stepper(mode, inside=inside)
    path = "observation/count" if inside else "observation"
    row, ignored = made.reset([0, 0]), np.zeros(SLOTS, bool)
    for _ in range(12):
        assert row["mask/action"].dtype == bool
        for slot in range(SLOTS):
            expected = [True] * 3 if ignored[slot] else [k == row[path][slot, 0] % 3 for k in range(3)]
            assert row["mask/action"][slot].tolist() == expected
        stepped = made.step(np.zeros(SLOTS, np.int64))
        row = stepped.observation
        ignored = stepped.terminated if mode is AutoresetMode.NEXT_STEP else ignored
        assert "mask" not in row


@pytest.mark.promise("dqn-values-truncated-step")
@pytest.mark.parametrize("inside", [False, True], ids=["info", "observation"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_what_a_last_observation_allows_comes_with_it(mode: AutoresetMode, *, inside: bool) -> None:
    made = stepper(mode, inside=inside, cut=True)
    path = "observation/count" if inside else "observation"
    made.reset([0, 0])
    seen = 0
    for _ in range(12):
        ended = made.step(np.zeros(SLOTS, np.int64)).ended
        for row in range(0 if ended is None else len(ended.slots)):
            assert ended is not None
            count = ended.observation[path][row, 0]
            assert ended.observation["mask/action"][row].tolist() == [k == count % 3 for k in range(3)]
            seen += 1
    assert seen >= 4


@pytest.mark.parametrize("mode", AutoresetMode)
def test_slots_whose_episode_begins_are_told(mode: AutoresetMode) -> None:
    made = stepper(mode)
    made.reset([0, 0])
    for _ in range(12):
        stepped = made.step(np.zeros(SLOTS, np.int64))
        begins = np.zeros(SLOTS, bool) if stepped.begins is None else stepped.begins
        assert begins.tolist() == (stepped.observation["observation"][:, 0] == 0).tolist()


def test_a_mask_that_allows_nothing_names_slot_and_step() -> None:
    made = stepper(AutoresetMode.SAME_STEP, broken=3)
    made.reset([0, 0])
    made.step(np.zeros(SLOTS, np.int64))
    made.step(np.zeros(SLOTS, np.int64))
    with pytest.raises(Fatal, match=r"mask_key='mask': mask/action of slot 1 allows nothing.* at step 3"):
        made.step(np.zeros(SLOTS, np.int64))


def test_an_environment_without_masks_is_told() -> None:
    masks = Masks("action_mask", Discrete(2), 1)
    with pytest.raises(Fatal, match=r"slot 0 allows nothing, or was not given, at step 0"):
        masks.check(masks.read(np.zeros((1, 3)), {}), np.ones(1, bool))


def in_slots(*rows: Any) -> Any:
    """As Gymnasium collects what it does not know."""
    column = np.full(len(rows), None, object)
    for index, one in enumerate(rows):
        column[index] = one
    return column


A, B = np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8)
FORMS: dict[str, tuple[Space, Any]] = {
    "flat for several choices": (MultiDiscrete((2, 3)), np.array([[1, 0, 0, 1, 1]] * SLOTS)),
    "a tuple for several choices": (MultiDiscrete((2, 3)), in_slots((A, B), (A, B))),
    "a tuple of parts": (Tuple((Discrete(2), box(2), Discrete(3))), in_slots((A, None, B), (A, None, B))),
    "parts of an observation": (Tuple((Discrete(2), Discrete(3))), (np.stack([A, A]), np.stack([B, B]))),
    "parts by name, in any order": (
        Dict((("a", Discrete(2)), ("b", Discrete(3)))),
        {"b": np.stack([B, B]), "_b": np.ones(2, bool), "a": np.stack([A, A]), "_a": np.ones(2, bool)},
    ),
    "flat for parts": (Tuple((Discrete(2), box(2), Discrete(3))), np.array([[1, 0, 0, 1, 1]] * SLOTS)),
}


@pytest.mark.parametrize(("space", "given"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_mask_is_read_in_the_order_of_the_space(space: Space, given: Any) -> None:
    rows = Masks("m", space, SLOTS).read(np.zeros(SLOTS), {"m": given})
    assert np.concatenate(list(rows.values()), 1).tolist() == [[True, False, False, True, True]] * SLOTS
    assert all(name.startswith("mask/action") for name in rows)


def test_a_mask_of_another_size_is_refused_with_both_numbers() -> None:
    with pytest.raises(Fatal, match=r"masks of 4 choices came, the action space has 3"):
        Masks("m", Discrete(3), SLOTS).read(np.zeros(SLOTS), {"m": np.ones((SLOTS, 4))})
