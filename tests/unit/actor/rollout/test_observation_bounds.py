"""An environment that leaves its space: a terminal state may, anything else ends the actor by name."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields, ObservationBounds
from penstock.learner.batch import check_meaning
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Publication
from penstock.protocol.schema import Ranges, fragment_schema
from penstock.protocol.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from penstock.runtime.exit import Fatal

SLOTS, UNROLL, LENGTH = 2, 3, 4
ABSORBING = Discrete(16)
BOUNDED = Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
PAIR = MultiDiscrete((3, 3))
NOTHING = Dict(())


class Leaving(gymnasium.Env[Any, Any]):
    """Shows `inside` but after step `leaves`, where it shows `outside`; an episode has LENGTH steps."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    action_space = spaces.Discrete(2)

    def __init__(self, seen: Any, inside: Any, outside: Any, leaves: int, *, truncates: bool) -> None:
        self.observation_space = seen
        self._inside, self._outside, self._leaves = inside, outside, leaves
        self._truncates, self._step = truncates, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._step = 0
        return self._inside, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make one step."""
        self._step += 1
        over = self._step == LENGTH
        shown = self._outside if self._step == self._leaves else self._inside
        return shown, 1.0, over and not self._truncates, over and self._truncates, {}


CASES = [
    (spaces.Discrete(16), ABSORBING, 3, 16, "holds 16"),
    (spaces.MultiDiscrete([3, 3]), PAIR, np.zeros(2, np.int64), np.full(2, 3), "holds 3"),
    (spaces.Box(-1, 1, (2,)), BOUNDED, np.zeros(2, np.float32), np.full(2, np.nan), "holds NaN or infinity"),
    (spaces.Box(-1, 1, (2,)), BOUNDED, np.zeros(2, np.float32), np.full(2, 1e7), "outside ±1000"),
]


def played(case: Any, mode: AutoresetMode, leaves: int, *, truncates: bool) -> list[tuple[Fragment, Any]]:
    """Fragments of two episodes and a half, with what was acted on in them."""
    seen, space, inside, outside, _ = case

    def make() -> gymnasium.Env[Any, Any]:
        return Leaving(seen, inside, outside, leaves, truncates=truncates)

    stepper = Stepper(SyncVectorEnv([make] * SLOTS, copy=False, autoreset_mode=mode), space)
    builder = FragmentBuilder(
        fragment_schema(space, Discrete(2)), UNROLL, SLOTS, bounds=ObservationBounds(space)
    )
    builder.start(stepper.reset([0] * SLOTS))
    found = []
    for sequence in range(1, 5):
        acted_on = []
        for _ in range(UNROLL):
            acted_on.append(builder.observation()["observation"].copy())
            action = np.zeros(SLOTS, np.int64)
            builder.record({"action": action}, np.zeros(SLOTS, np.float32), stepper.step(action))
        fields = HeaderFields(run="r", session=1, sequence=sequence, weights=Publication(1, 1), round=0)
        found.append((builder.cut(fields)[0], np.stack(acted_on)))
    return found


@pytest.mark.promise("terminal-observation-outside-space")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_terminal_state_of_no_space_is_neither_acted_on_nor_refused(case: Any, mode: AutoresetMode) -> None:
    space: Space = case[1]
    ranges = Ranges.of_run(space, Discrete(2), NOTHING)
    ends = 0
    for fragment, acted_on in played(case, mode, LENGTH, truncates=False):
        assert ranges.of["observation"].holds(acted_on)
        arrays = fragment.arrays()
        ends += len(arrays["final/step"])
        assert not ranges.of["observation"].holds(arrays["final/observation"]) or not len(
            arrays["final/step"]
        )
        taken = check_meaning(fragment.header, arrays, ranges)
        assert ranges.of["observation"].holds(taken["observation"])
    assert ends >= 2 * SLOTS


@pytest.mark.promise("environment-leaves-space-otherwise")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(("leaves", "truncates"), [(2, False), (2, True), (LENGTH, True)])
def test_an_environment_that_leaves_its_space_ends_the_actor_by_name(
    case: Any, mode: AutoresetMode, leaves: int, truncates: bool
) -> None:
    with pytest.raises(Fatal, match=rf"the environment left its observation_space: .*{case[4]}"):
        played(case, mode, leaves, truncates=truncates)
