import json
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box as GymnasiumBox
from gymnasium.spaces import Discrete as GymnasiumDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from penstock.actor import specification as run
from penstock.actor.acting.masks import LearnerReward, Masks, PotentialError, learner_reward, potentials
from penstock.actor.acting.stepper import Stepper, autoreset_mode
from penstock.actor.evaluator import Played, Playing, in_waves, play_wave
from penstock.actor.process import watch_broker
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.actor.rollout.loop import note_lag, watch
from penstock.actor.specification import overlay, policy_maker
from penstock.config.sections import EnvironmentSection, RewardWrapper
from penstock.config.settings import ActorSection, ConfigurationError, PolicySection
from penstock.config.trusted import check_trusted
from penstock.policy.actor_critic import CustomBody
from penstock.policy.policy import Policy, build
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import MAX_WATCH_WAIT_MS, WATCH_GRACE_S
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import Array
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health
from penstock.workloads.control.environment import spaces as environment_spaces
from tests.support.experience.counting_environments import LENGTHS, NESTED, OBSERVATION, vector
from tests.support.experience.experience import box
from tests.support.run import small_run


def test_slowly_arriving_weights_are_progress_and_stalled_ones_are_not() -> None:
    now = [0.0]
    health = Health("actor", lambda: now[0])
    watch(health, stall_timeout_s=100.0)
    for arrived in range(5):
        note_lag(health, 1, 2, arrived)
        now[0] += 60.0
    assert health.problem() is None
    note_lag(health, 1, 2, 0)
    now[0] += 60.0
    assert health.problem() is not None
    note_lag(health, 2, 2, 0)
    assert health.problem() is None


@pytest.mark.promise("healthz-role-turns-red")
def test_a_silent_broker_is_distinguished_from_one_that_holds_a_call() -> None:
    now = [0.0]
    health = Health("actor", lambda: now[0])
    answered = watch_broker(health, stall_timeout_s=10.0)
    now[0] += MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S + 5.0
    assert health.problem() is None
    answered()
    now[0] += MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S + 15.0
    problem = health.problem()
    assert problem is not None
    assert problem.startswith("broker: no progress for ")
    answered()
    assert health.problem() is None


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
        super().reset(seed=seed)
        self._step = 0
        return self._look(over=False)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
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
    factories = [
        lambda length=length: Counted(length, inside=inside, broken=broken, cut=cut) for length in (2, 4)
    ]
    space: Space = Dict((("count", COUNT),)) if inside else COUNT
    return Stepper(SyncVectorEnv(factories, autoreset_mode=mode), space, Masks("mask", Discrete(3), SLOTS))


@pytest.mark.parametrize("inside", [False, True], ids=["info", "observation"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_mask_belongs_to_the_observation_of_its_step(mode: AutoresetMode, *, inside: bool) -> None:
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
        begins = np.zeros(SLOTS, bool) if stepped.begins is None else stepped.begins
        assert begins.tolist() == (row[path][:, 0] == 0).tolist()
        ignored = stepped.terminated if mode is AutoresetMode.NEXT_STEP else ignored
        assert "mask" not in row


@pytest.mark.promise("dqn-values-truncated-step")
@pytest.mark.parametrize("inside", [False, True], ids=["info", "observation"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_last_observation_comes_with_its_mask(mode: AutoresetMode, *, inside: bool) -> None:
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


def test_a_mask_that_allows_nothing_names_slot_and_step() -> None:
    made = stepper(AutoresetMode.SAME_STEP, broken=3)
    made.reset([0, 0])
    made.step(np.zeros(SLOTS, np.int64))
    made.step(np.zeros(SLOTS, np.int64))
    with pytest.raises(Fatal, match=r"mask_key='mask': mask/action of slot 1 allows nothing.* at step 3"):
        made.step(np.zeros(SLOTS, np.int64))


def test_an_environment_without_masks_is_reported() -> None:
    masks = Masks("action_mask", Discrete(2), 1)
    with pytest.raises(Fatal, match=r"slot 0 allows nothing, or was not given, at step 0"):
        masks.check(masks.read(np.zeros((1, 3)), {}), np.ones(1, bool))


def in_slots(*rows: Any) -> Any:
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


def test_a_mask_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigurationError, match=r"masks of 4 choices came, the action space has 3"):
        Masks("m", Discrete(3), SLOTS).read(np.zeros(SLOTS), {"m": np.ones((SLOTS, 4))})


@pytest.mark.parametrize("value", [-np.inf, -1e9, np.nan, 2.0, -1])
@pytest.mark.parametrize("place", ["info", "observation", "object"])
def test_a_mask_that_holds_neither_0_nor_1_is_refused(value: float, place: str) -> None:
    """Among them masks that are added to logits: 0 where an action is allowed."""
    given: Any = np.array([[0.0, value, value]] * SLOTS)
    given = in_slots(*given) if place == "object" else given
    masks, key = Masks("m", Discrete(3), SLOTS), {"m": given}
    with pytest.raises(Fatal, match=r"environment.mask_key='m': a mask holds .*; use 1 where .* allowed"):
        masks.read(*((key, {}) if place == "observation" else (np.zeros(SLOTS), key)))


HERE = __name__
DISCOUNT = 0.5
STEPS = 7


def progress(observation: Mapping[str, Array]) -> Array:
    """Φ = 10 · step: the last of the three numbers that a counting environment shows."""
    rows = observation["observation"] if "observation" in observation else observation["observation/count"]
    return np.multiply(10.0, rows[:, 2])


def not_a_number(observation: Mapping[str, Array]) -> Array:
    return np.full(len(observation["observation"]), np.nan)


def one_for_all(observation: Mapping[str, Array]) -> Array:
    return np.zeros(1)


def section(*wrappers: dict[str, Any]) -> EnvironmentSection:
    return EnvironmentSection.model_validate({"reward": wrappers})


def shape(name: str = "progress") -> dict[str, Any]:
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


def test_shaping_is_zero_where_a_step_only_resets() -> None:
    found = rewards(collect(AutoresetMode.NEXT_STEP, shape())[0])
    assert found == [SHAPED[0][: len(found[0])], SHAPED[1][: len(found[1])]]
    assert [len(slot) for slot in found] == [5, 5]


@pytest.mark.promise("reward-wrappers-change-rewards")
@pytest.mark.parametrize("wrappers", [(), ({"scale": 0.0},), (shape(), {"clip": [-1, 1]})])
def test_episode_returns_are_those_of_the_environment(wrappers: tuple[dict[str, Any], ...]) -> None:
    _, episodes = collect(AutoresetMode.SAME_STEP, *wrappers, cuts=(2, 5))
    assert [(one.slot_id, one.episode_return) for one in episodes] == [
        (1, 1.0), (0, 6.0), (0, 101.0), (1, 410.0), (1, 403.0),
    ]  # fmt: skip


def test_rewards_beyond_float32_are_clipped_to_its_range() -> None:
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
def test_an_invalid_wrapper_is_refused(wrapper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(wrapper)


def test_a_potential_is_imported_only_where_its_module_is_allowed() -> None:
    (potential,) = potentials(section(shape(), {"scale": 1.0}))
    check_trusted("environment.reward", potential, (HERE,))
    with pytest.raises(ConfigurationError, match=f"environment.reward=.*import '{HERE}'.*allow_modules"):
        check_trusted("environment.reward", potential, ())


def test_a_reset_between_an_end_and_its_reset_step_starts_clean() -> None:
    made, action = Stepper(vector(AutoresetMode.NEXT_STEP, 2), OBSERVATION), np.zeros(2, np.int64)
    made.reset([0, 0])
    made.step(action)
    made.reset([0, 0])
    assert made.step(action).valid is None


def test_a_vector_environment_with_an_unknown_reset_mode_is_refused() -> None:
    environment = vector(AutoresetMode.NEXT_STEP, 1)
    environment.metadata = {"autoreset_mode": "Sometimes"}
    with pytest.raises(ConfigurationError, match=r"autoreset_mode.*'Sometimes'.*vectorise='sync'"):
        autoreset_mode(environment)


class ReusingArrays(VectorEnv[Any, Any, Any]):
    """Two slots that truncate at every second step, with one array each for all that a step returns."""

    def __init__(self) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.num_envs = 2
        self.single_observation_space = GymnasiumBox(-1, 20, (1,))
        self.single_action_space = GymnasiumDiscrete(2)
        self.observation, self.reward = np.zeros((2, 1), np.float32), np.zeros(2)
        self.ended, self.truncated = np.zeros(2, np.bool_), np.zeros(2, np.bool_)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.steps = 0
        for one in (self.observation, self.reward, self.ended, self.truncated):
            one[:] = 0
        return self.observation, {}

    def step(self, actions: Any) -> Any:
        actions[:] = 7
        self.steps += 1
        self.observation[:], self.reward[:], self.truncated[:] = 5 * self.steps, 1.0, self.steps == 2
        return self.observation, self.reward, self.ended, self.truncated, {}


def test_a_reset_that_clears_arrays_of_the_step_changes_no_experience() -> None:
    space = Box(np.full(1, -1.0, np.float32), np.full(1, 20.0, np.float32))
    made, chosen = Stepper(ReusingArrays(), space), np.ones(2, np.int64)
    made.reset([0, 1])
    made.step(chosen)
    stepped = made.step(chosen)
    assert stepped.reward.tolist() == [1.0, 1.0]
    assert stepped.truncated.tolist() == [True, True]
    assert stepped.ended is not None
    assert stepped.ended.observation["observation"].tolist() == [[10.0], [10.0]]
    assert chosen.tolist() == [1, 1], "what the policy chose, whatever the environment writes in its action"


POLICY = build(OBSERVATION, Discrete(2), PolicySection(), 0)


def evaluate(mode: AutoresetMode, slots: int, episodes: int, stop: threading.Event) -> list[Played] | None:
    stepper = Stepper(vector(mode, slots), OBSERVATION)
    how = Playing(deterministic=True, stop=stop)
    return in_waves(episodes, (play_wave(stepper, POLICY, 5 + first, how) for first in count(0, slots)))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_only_the_first_episode_of_each_environment_counts(mode: AutoresetMode) -> None:
    played = evaluate(mode, 4, 4, threading.Event())
    assert played is not None
    assert [one.length for one in played] == list(LENGTHS)
    assert [one.episode_return for one in played] == [n * (n + 1) / 2 for n in LENGTHS]
    assert all(one.terminated for one in played)


def test_more_episodes_than_environments_are_played_in_waves() -> None:
    played = evaluate(AutoresetMode.SAME_STEP, 2, 5, threading.Event())
    assert played is not None
    assert [one.length for one in played] == [3, 1, 3, 1, 3]


def test_the_seeds_are_those_of_the_episodes() -> None:
    seen: list[int] = []

    class Recording(Stepper):
        def reset(self, seeds: Any) -> Mapping[str, Any]:  # type: ignore[override]
            seen.extend(seeds)
            return super().reset(seeds)

    stepper = Recording(vector(AutoresetMode.SAME_STEP, 2), OBSERVATION)
    how = Playing(deterministic=False, stop=threading.Event())
    in_waves(4, (play_wave(stepper, POLICY, 100 + first, how) for first in count(0, 2)))
    assert seen == [100, 101, 102, 103]


def test_a_drain_ends_an_evaluation_without_a_result() -> None:
    stop = threading.Event()
    stop.set()
    assert evaluate(AutoresetMode.SAME_STEP, 2, 2, stop) is None


def test_the_run_cannot_make_an_actor_write_somewhere() -> None:
    told = ActorSection(ack_journal=Path("/somewhere"))
    assert overlay(told, ActorSection()).ack_journal is None
    assert overlay(told, ActorSection(ack_journal=Path("/mine"))).ack_journal == Path("/mine")


def specification(**changes: Any) -> RunSpecification:
    observation, action = environment_spaces(EnvironmentSection())
    return replace(small_run.specification(), observation_space=observation, action_space=action, **changes)


def test_a_process_sets_only_its_own_threads_outbox_and_timeout(caplog: pytest.LogCaptureFixture) -> None:
    local = ActorSection(threads=4, outbox_fragments=2, stall_timeout_s=9, unroll_length=7, compress="off")
    read = run.read(specification(actor_json='{"threads":2,"unroll_length":32}'), local)
    assert (read.actor.threads, read.actor.outbox_fragments, read.actor.stall_timeout_s) == (4, 2, 9)
    assert read.actor.unroll_length == 32
    assert [record.__dict__["key"] for record in caplog.records] == ["actor.unroll_length"]


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ConfigurationError, match="workload='chess'.*control"):
        run.read(specification(workload="chess"), ActorSection())


def test_a_section_of_another_version_is_named() -> None:
    with pytest.raises(Fatal, match="section policy.*same version"):
        run.read(specification(policy_json='{"colour":1}'), ActorSection())


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "stranger.py").write_text("from tests.support.experience.own_networks import Good\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "stranger"
    sys.modules.pop("stranger", None)


@pytest.mark.parametrize(
    "asked",
    [
        {"environment_json": '{"id":"stranger:X-v0"}'},
        {"policy_json": '{"network":"stranger:Good"}'},
    ],
    ids=["environment", "network"],
)
def test_the_specification_cannot_allow_a_module_itself(stranger: str, asked: dict[str, str]) -> None:
    text = '{"allow_modules":["stranger"]}'
    with pytest.raises(ConfigurationError, match=r"asks this process to import 'stranger'.*allow_modules"):
        run.read(specification(actor_json=text, **asked), ActorSection())
    assert stranger not in sys.modules


@pytest.mark.parametrize(
    ("environment_id", "key"),
    [
        ("Chat-v0", "reward"),
        ("Prompts-v0", "reward_source"),
        ("Traces-v0", "trace_file"),
        ("Chat-v0", "model"),
    ],
)
@pytest.mark.parametrize("workload", ["control", "chat", "rlhf"])
def test_a_specification_cannot_set_a_place_of_an_environment(
    stranger: str, workload: str, environment_id: str, key: str
) -> None:
    text = json.dumps({"id": environment_id, "kwargs": {key: f"{stranger}:Good"}})
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{key}: .*actor\.places\.{key}"):
        run.read(specification(workload=workload, environment_json=text), ActorSection())
    assert stranger not in sys.modules


def test_serving_and_exporting_import_no_untrusted_network(stranger: str) -> None:
    asked = specification(policy_json='{"network":"stranger:Good"}')
    with pytest.raises(ConfigurationError, match=r"policy\.network='stranger:Good'.*allow_modules"):
        policy_maker(asked)
    assert stranger not in sys.modules
    assert isinstance(policy_maker(asked, ActorSection(allow_modules=(stranger,)))().actor_body, CustomBody)
    allowed = run.read(asked, ActorSection(allow_modules=(stranger,)))
    acting = allowed.make_policy(0).policy
    assert isinstance(acting, Policy)
    assert isinstance(acting.actor_body, CustomBody)
