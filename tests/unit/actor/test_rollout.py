import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.actor.acting.stepper import Ended, Stepped, Stepper
from penstock.actor.rollout.generator import (
    FragmentBuilder,
    HeaderFields,
    ObservationBounds,
    action_seed,
    environment_seeds,
    place_of,
)
from penstock.config.settings import ConfigurationError
from penstock.learner.batch import check_meaning
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.protocol.fragment import Fragment, Slot, WeightSpan, check
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import Ranges, TensorRule, fragment_schema, payload_room
from penstock.protocol.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from penstock.runtime.exit import Fatal
from tests.support.experience.counting_environments import (
    LENGTHS,
    NESTED,
    OBSERVATION,
    Transition,
    transitions,
    vector,
)

MODES = list(AutoresetMode)
SLOTS = 3
UNROLL = 5
RUN = "run-a"


def act(
    mode: AutoresetMode, lengths: Sequence[int], *, nested: bool = False
) -> tuple[list[Fragment], list[Episode]]:
    """Fragments of those lengths; the action of step k is k % 2 and its log-probability −k."""
    space = NESTED if nested else OBSERVATION
    schema = fragment_schema(space, Discrete(2))
    stepper = Stepper(vector(mode, SLOTS, nested=nested), space)
    builder = FragmentBuilder(schema, UNROLL, SLOTS)
    builder.start(stepper.reset([0] * SLOTS))
    fragments, finished, step = [], [], 0
    for sequence, length in enumerate(lengths, 1):
        for _ in range(length):
            action = np.full(SLOTS, step % 2)
            builder.record({"action": action}, np.full(SLOTS, -step, np.float32), stepper.step(action))
            step += 1
        fields = HeaderFields(run=RUN, session=7, sequence=sequence, weights=Publication(9, 4), round=2)
        fragment, episodes = builder.cut(fields)
        check(fragment, schema, RUN)
        fragments.append(fragment)
        finished += episodes
    return fragments, finished


def read(fragments: Sequence[Fragment], slot: int, observation: str = "observation") -> list[Transition]:
    """The valid steps of a slot as transitions; the one after an end is read from the final rows."""
    found = []
    for fragment in fragments:
        arrays: dict[str, Any] = fragment.arrays()
        observed = arrays[observation]
        last = {
            (int(n), int(t)): arrays[f"final/{observation}"][row]
            for row, (n, t) in enumerate(zip(arrays["final/slot"], arrays["final/step"], strict=True))
        }
        for step in range(fragment.header.steps):
            if arrays["valid"][step, slot]:
                terminated, truncated = (
                    bool(arrays["terminated"][step, slot]),
                    bool(arrays["truncated"][step, slot]),
                )
                over = terminated or truncated
                assert over == ((slot, step) in last)
                following = last[slot, step] if over else observed[step + 1, slot]
                reward = float(arrays["reward"][step, slot])
                found.append(
                    Transition(place(observed[step, slot]), reward, terminated, truncated, place(following))
                )
    return found


def place(observation: Any) -> tuple[int, int]:
    return int(observation[1]), int(observation[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "lengths", [[5] * 8, [1] * 40, [5, 2, 4, 1, 3] * 4], ids=["full", "single", "ragged"]
)
def test_the_valid_steps_are_the_experience_of_the_environment(
    mode: AutoresetMode, lengths: list[int]
) -> None:
    fragments, _ = act(mode, lengths)
    for slot in range(SLOTS):
        found = read(fragments, slot)
        assert len(found) == sum(lengths) or mode is AutoresetMode.NEXT_STEP
        assert len(found) > sum(lengths) / 2
        assert found == list(itertools.islice(transitions(slot), len(found)))


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_fill_every_tensor(mode: AutoresetMode) -> None:
    fragments, _ = act(mode, [5] * 4, nested=True)
    for slot in range(SLOTS):
        found = read(fragments, slot, "observation/count")
        assert found == list(itertools.islice(transitions(slot), len(found)))
    arrays: dict[str, Any] = fragments[0].arrays()
    assert (arrays["observation/pair/0"] == arrays["observation/count"][..., 2]).all()
    assert (arrays["final/observation/pair/1"] == arrays["final/observation/count"] + 0.5).all()


@pytest.mark.parametrize("mode", MODES)
def test_returns_and_lengths_are_right_across_cuts(mode: AutoresetMode) -> None:
    _, finished = act(mode, [2] * 20)
    for slot in range(SLOTS):
        mine = [episode for episode in finished if episode.slot_id == slot]
        assert [episode.episode_id for episode in mine] == list(range(len(mine)))
        for episode in mine:
            number = episode.episode_id
            length = LENGTHS[(number + slot) % len(LENGTHS)]
            assert episode.length == length
            assert episode.episode_return == 100.0 * number * length + length * (length + 1) / 2
            assert episode.terminated == (number % 2 == 0)
            assert episode.version == 9


def test_the_header_gives_each_slots_start_and_weights() -> None:
    fragments, _ = act(AutoresetMode.SAME_STEP, [5, 2])
    first, second = (fragment.header for fragment in fragments)
    assert first.slots == (Slot(0, 0, 0), Slot(1, 0, 0), Slot(2, 0, 0))
    # Lengths 3 1 4 2, 1 4 2 3, 4 2 3 1: after five steps slot 0 is in its third episode, and so on.
    assert second.slots == (Slot(0, 2, 1), Slot(1, 2, 0), Slot(2, 1, 1))
    assert second.weights == (WeightSpan(0, 0, 2, 9, 4),)
    assert (second.session, second.sequence, second.round, second.steps) == (7, 2, 2, 2)


def test_actions_and_log_probabilities_belong_to_their_step() -> None:
    fragments, _ = act(AutoresetMode.SAME_STEP, [5, 5])
    arrays: dict[str, Any] = fragments[1].arrays()
    assert arrays["action"][:, 0].tolist() == [1, 0, 1, 0, 1]
    assert arrays["log_prob"][:, 1].tolist() == [-5, -6, -7, -8, -9]


def test_observations_are_compressed_where_set() -> None:
    schema = fragment_schema(OBSERVATION, Discrete(2))
    stepper = Stepper(vector(AutoresetMode.SAME_STEP, SLOTS), OBSERVATION)
    builder = FragmentBuilder(schema, UNROLL, SLOTS, compress=True)
    builder.start(stepper.reset([0] * SLOTS))
    action = np.zeros(SLOTS, np.int64)
    builder.record({"action": action}, np.zeros(SLOTS, np.float32), stepper.step(action))
    fragment, _ = builder.cut(HeaderFields(run=RUN, session=1, sequence=1, weights=Publication(1), round=0))
    check(fragment, schema, RUN)
    assert [entry.name for entry in fragment.header.tensors if entry.codec == "lz4"] == ["observation"]
    assert read([fragment], 0) == list(itertools.islice(transitions(0), 1))


def test_a_fragment_is_cut_before_it_outgrows_a_message() -> None:
    slots, unroll = 4, 8
    large = Box(np.zeros((256, 256, 3), np.uint8), np.full((256, 256, 3), 255, np.uint8))
    schema = fragment_schema(large, Discrete(2))
    assert schema.most_ends(unroll, slots) >= slots
    assert schema.fragment_bytes(unroll, slots, unroll * slots) > MAX_MESSAGE_BYTES
    observation = {"observation": np.zeros((slots, *large.shape), np.uint8)}
    over = np.ones(slots, np.bool_)
    ended = Ended(np.arange(slots), observation)
    stepped = Stepped(observation, np.ones(slots), over, ~over, None, ended)
    builder = FragmentBuilder(schema, unroll, slots)
    builder.start(observation)
    lengths = []
    for sequence in (1, 2):
        while not builder.is_full:
            builder.record({"action": np.zeros(slots, np.int64)}, np.zeros(slots, np.float32), stepped)
        fragment, episodes = builder.cut(
            HeaderFields(run=RUN, session=1, sequence=sequence, weights=Publication(1), round=0)
        )
        check(fragment, schema, RUN)
        assert len(fragment.payload) <= payload_room(slots)
        assert len(episodes) == fragment.header.charge
        lengths.append(fragment.header.steps)
    assert 1 < lengths[0] == lengths[1] < unroll


def test_a_tensor_that_no_step_gives_is_refused() -> None:
    extra = (TensorRule(name="extra/thought", dtype="int32"),)
    with pytest.raises(ConfigurationError, match=r"extra/thought.*own rollout"):
        FragmentBuilder(fragment_schema(OBSERVATION, Discrete(2), extra), UNROLL, SLOTS)


BOUNDS_SLOTS, BOUNDS_UNROLL, LENGTH = 2, 3, 4
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
        self._step = 0
        return self._inside, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
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

    stepper = Stepper(SyncVectorEnv([make] * BOUNDS_SLOTS, copy=False, autoreset_mode=mode), space)
    builder = FragmentBuilder(
        fragment_schema(space, Discrete(2)), BOUNDS_UNROLL, BOUNDS_SLOTS, bounds=ObservationBounds(space)
    )
    builder.start(stepper.reset([0] * BOUNDS_SLOTS))
    found = []
    for sequence in range(1, 5):
        acted_on = []
        for _ in range(BOUNDS_UNROLL):
            acted_on.append(builder.observation()["observation"].copy())
            action = np.zeros(BOUNDS_SLOTS, np.int64)
            builder.record({"action": action}, np.zeros(BOUNDS_SLOTS, np.float32), stepper.step(action))
        fields = HeaderFields(run="r", session=1, sequence=sequence, weights=Publication(1, 1), round=0)
        found.append((builder.cut(fields)[0], np.stack(acted_on)))
    return found


@pytest.mark.promise("terminal-observation-outside-space")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_terminal_observation_outside_its_space_is_neither_used_nor_refused(
    case: Any, mode: AutoresetMode
) -> None:
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
    assert ends >= 2 * BOUNDS_SLOTS


@pytest.mark.promise("environment-leaves-space-otherwise")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(("leaves", "truncates"), [(2, False), (2, True), (LENGTH, True)])
def test_an_observation_outside_its_space_ends_the_actor_and_is_named(
    case: Any, mode: AutoresetMode, leaves: int, truncates: bool
) -> None:
    with pytest.raises(Fatal, match=rf"the environment left its observation_space: .*{case[4]}"):
        played(case, mode, leaves, truncates=truncates)


def test_every_slot_of_every_session_has_its_own_seeds() -> None:
    seeds = [
        seed
        for run in (0, 2**62)
        for actor in ("actor-0", "actor-1")
        for salt in (0, 1, 2**20)
        for seed in [*environment_seeds(run, actor, salt, 16), action_seed(run, actor, salt)]
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("actor_id", "actors", "first"),
    [("actor-0", 3, 0), ("actor-2", 3, 16), ("host-7-actor-4", 3, 8), ("actor-9", 0, 0)],
)
def test_the_index_of_an_actor_is_the_number_at_the_end_of_its_id(
    actor_id: str, actors: int, first: int
) -> None:
    assert place_of(actor_id, actors, 8) == ExplorationSlots(first=first, of=8 * max(1, actors))


def test_an_id_without_a_number_has_an_index_too() -> None:
    place = place_of("penstock-actor-x7k", 4, 8)
    assert place == place_of("penstock-actor-x7k", 4, 8)
    assert place.first in (0, 8, 16, 24)
