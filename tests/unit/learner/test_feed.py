from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from penstock.broker.log.replies import LogEntry
from penstock.config.settings import (
    CloneSection,
    DQNSection,
    ImpalaSection,
    PolicySection,
    PPOSection,
    ReinforceSection,
    SACSection,
)
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.algorithms.clone import Clone
from penstock.learner.algorithms.off_policy.dqn import DQN
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.learner.algorithms.ppo import PPO, Impala, Reinforce
from penstock.learner.batch import Batch, Upload, assemble, check_meaning, tensors
from penstock.learner.feed.log_feed import Pending
from penstock.policy import policy as building
from penstock.policy.policy import Policy
from penstock.protocol.fragment import build, check_content
from penstock.protocol.schema import Ranges
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from penstock.runtime import metrics
from tests.support.abuse.poisoner import (
    OF_BOXES,
    OF_CHOICES,
    OF_DENSITIES,
    OF_DRAWS,
    OF_EVERY_RUN,
    OF_MASKS,
    OF_RATIOS,
    OF_STATE,
    Way,
)
from tests.support.experience.experience import Collector, Fragment, Line, box, cartpoles, small_policy
from tests.support.experience.remembering import Actor, remembering
from tests.support.experience.replay_worlds import q_policy
from tests.support.run.small_run import SLOTS, fragment
from tests.support.run.small_run import STEPS as SMALL_RUN_STEPS

NOTHING = Dict(())


def good() -> Fragment:
    return Collector(cartpoles(2, max_episode_steps=4)).fragment(small_policy(), 6)


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
def test_a_contradictory_fragment_is_refused(name: str, value: float, message: str) -> None:
    header, arrays = good()
    changed = arrays[name].copy()
    changed.flat[0] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays | {name: changed})


@pytest.mark.promise("tensor-held-against-space")
@pytest.mark.parametrize("space", [Discrete(2), MultiDiscrete((2, 3)), MultiBinary(2)])
def test_an_action_with_a_probability_above_1_is_refused(space: Space) -> None:
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
    fragment = Actor(remembering(recurrent="lstm"), masked=True).fragment(6)
    return fragment.header, {name: array.copy() for name, array in fragment.arrays().items()}


@pytest.mark.parametrize(
    ("name", "rows", "value", "message"),
    [
        ("mask/action", ..., False, "mask/action: allows nothing at step 0 of slot 0"),
        ("mask/action", -1, False, "mask/action: allows nothing after step"),
        ("action", ..., 9, "mask/action: forbids the action that was taken at step"),
        ("state/actor/c", ..., np.inf, "state/actor/c: holds NaN or infinity"),
    ],
)
def test_unusable_masks_and_states_are_refused(name: str, rows: Any, value: Any, message: str) -> None:
    header, arrays = masked_fragment()
    check_meaning(header, arrays)
    arrays["mask/action"][:] = [True, True, name != "action"]
    arrays[name][rows] = value
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
def test_a_terminal_observation_outside_its_space_is_replaced_and_counted() -> None:
    ranges = Ranges.of_run(Discrete(16), Discrete(2), NOTHING)
    before = metrics.TERMINAL_OBSERVATIONS_REPLACED._value.get()
    header, arrays = terminal(15)
    assert check_meaning(header, arrays, ranges)["final/observation"].tolist() == [15]
    assert metrics.TERMINAL_OBSERVATIONS_REPLACED._value.get() == before
    header, arrays = terminal(16)
    assert check_meaning(header, arrays, ranges)["final/observation"].tolist() == [3]
    assert metrics.TERMINAL_OBSERVATIONS_REPLACED._value.get() == before + 1


def test_a_last_row_behind_a_terminated_step_is_replaced_and_behind_a_truncated_one_refused() -> None:
    ranges = Ranges.of_run(Discrete(16), Discrete(2), NOTHING)
    header, arrays = terminal(4)
    arrays["terminated"][:, 0] = [False, True]
    arrays["final/step"][:] = 1
    arrays["observation"][2, 0] = 16
    assert check_meaning(header, arrays, ranges)["observation"][:, 0].tolist() == [3, 4, 4]
    arrays["terminated"][:], arrays["truncated"][1] = False, True
    with pytest.raises(ValueError, match="observation: holds 16"):
        check_meaning(header, arrays, ranges)
    header, arrays = terminal(16)
    arrays["truncated"][:], arrays["terminated"][:] = arrays["terminated"], False
    with pytest.raises(ValueError, match="final/observation: holds 16"):
        check_meaning(header, arrays, ranges)


@pytest.mark.promise("tensor-held-against-space")
def test_masks_of_several_choices_are_checked_for_each_choice() -> None:
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


@pytest.mark.parametrize("section", [{"recurrent": "lstm"}, {"recurrent": "gru"}, {"frame_stack": 3}])
def test_a_fragment_of_a_recurrent_policy_passes(section: dict[str, Any]) -> None:
    policy = remembering(**section)
    actor = Actor(policy, masked=True)
    ranges = Ranges.of_run(policy.observation_space, policy.action_space, policy.state_space)
    for steps in (1, 5, 8):
        fragment = actor.fragment(steps)
        check_meaning(fragment.header, fragment.arrays(), ranges)
    arrays = {name: array.copy() for name, array in fragment.arrays().items()}
    name = next(name for name in arrays if name.startswith("state/") and arrays[name].dtype.kind == "f")
    arrays[name].flat[0] = 1e12
    with pytest.raises(ValueError, match=f"{name}: holds 1e"):
        check_meaning(fragment.header, arrays, ranges)


@pytest.mark.parametrize("told", [False, True], ids=["not told", "told"])
def test_a_last_observation_has_its_mask_or_the_one_before_it(*, told: bool) -> None:
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


COUNT, SPOILED, STEPS = 6, 3, 8
BOUNDS = {"reward": 1e6, "log_prob": 1e4}
REPLAY: dict[str, Any] = {
    "capacity": 512, "learning_starts": 16, "batch_size": 16, "replay_ratio": 0.125, "error_steps": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    policy: Callable[[], Policy]
    make: Callable[[Policy], Algorithm]
    ways: Sequence[Way]


def squashed() -> Policy:
    section = SACSection(**REPLAY).policy_section(PolicySection(hidden_sizes=(16,)))
    return building.build(box(4), box(1), section, 0)


CHOICES = (*OF_EVERY_RUN, *OF_BOXES, *OF_CHOICES)
OF_RATIO_CHOICES = (*CHOICES, *OF_RATIOS)
DRAWS = (*OF_EVERY_RUN, *OF_BOXES, *OF_DRAWS)
REMEMBERING = partial(remembering, recurrent="lstm")
MEMORY = (*OF_EVERY_RUN, *OF_BOXES, *OF_MASKS, *OF_STATE)


def ppo(policy: Policy) -> Algorithm:
    return PPO(policy, PPOSection(epochs=1, minibatches=1), seed=0)


def clone(policy: Policy) -> Algorithm:
    return Clone(policy, CloneSection(minibatches=1), seed=0)


CASES = (
    Case("ppo", small_policy, ppo, OF_RATIO_CHOICES),
    Case("impala", small_policy, lambda p: Impala(p, ImpalaSection(), seed=0), OF_RATIO_CHOICES),
    Case(
        "reinforce", small_policy, lambda p: Reinforce(p, ReinforceSection(), seed=0), (*CHOICES, *OF_RATIOS)
    ),
    Case("clone", small_policy, clone, CHOICES),
    Case(
        "dqn", lambda: q_policy(DQNSection(**REPLAY)), lambda p: DQN(p, DQNSection(**REPLAY), seed=0), CHOICES
    ),
    Case("ppo, a box", lambda: small_policy(action=box(1)), ppo, (*DRAWS, *OF_RATIOS, *OF_DENSITIES)),
    Case("sac", squashed, lambda p: SAC(p, SACSection(**REPLAY), seed=0), DRAWS),
    Case("ppo, masks and memory", REMEMBERING, ppo, (*MEMORY, *OF_RATIOS)),
    Case("clone, masks and memory", REMEMBERING, clone, MEMORY),
)


@cache
def honest(case: Case) -> list[Fragment]:
    policy = case.policy()
    if policy.state_space.spaces:
        actors = [Actor(policy, masked=True, session=number, seed=number) for number in range(1, COUNT + 1)]
        made = [actor.fragment(STEPS) for actor in actors]
        return [(fragment.header, dict(fragment.arrays())) for fragment in made]
    return [
        Collector([Line(5, "truncated"), Line(3, "terminated")], session).fragment(policy, STEPS)
        for session in range(1, COUNT + 1)
    ]


def outcome(case: Case, way: Way) -> str:
    """What becomes of a fragment that is spoiled in that way; the honest ones are trained."""
    parts = list(honest(case))
    header, arrays = parts[SPOILED - 1]
    spoiled = {name: array.copy() for name, array in arrays.items()}
    way.spoil(spoiled)
    fragment = build(header, spoiled)
    policy = case.policy()
    ranges = Ranges.of_run(policy.observation_space, policy.action_space, policy.state_space)
    for other, found in parts:
        check_meaning(other, found, ranges)
    try:
        check_content(fragment.header, fragment.payload, BOUNDS)
    except ValueError:
        return "broker"
    try:
        checked = check_meaning(header, spoiled, ranges)
    except ValueError:
        return "check"
    parts[SPOILED - 1] = (header, dict(checked))
    culprits = trained(case.make(policy), parts)
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())
    if culprits:
        assert culprits == {SPOILED}
        return "update"
    same = all(np.array_equal(checked[name], spoiled[name]) for name in spoiled)
    return "bounded" if same else "replaced"


def trained(algorithm: Algorithm, parts: list[Fragment]) -> set[int]:
    """Learn from all, and again from the honest ones; returns the fragments that were left out."""
    alone = algorithm.makes_batch(1, 1)
    places = [[number] for number in range(1, COUNT + 1)] if alone else [list(range(1, COUNT + 1))]
    left_out: set[int] = set()
    for numbers in places:
        update = algorithm.update(batch_of(parts, numbers), progress=0.0)
        assert np.isfinite(list(update.metrics.values())).all()
        left_out |= set(update.culprits) if update.applied else set(numbers)
    numbers = [number for number in range(1, COUNT + 1) if number != SPOILED]
    for numbered in [[number] for number in numbers] if alone else [numbers]:
        assert algorithm.update(batch_of(parts, numbered, COUNT), progress=0.0).applied
    return left_out


def batch_of(parts: list[Fragment], numbers: list[int], behind: int = 0) -> Batch:
    """Some of the fragments, as log entries of these numbers and so many more."""
    places = [(number + behind, 100) for number in numbers]
    return assemble([parts[number - 1] for number in numbers], torch.device("cpu"), places)


@pytest.mark.promise("54-ways-poison-fragment")
@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}: {way.name}") for case in CASES for way in case.ways],
)
def test_detectable_poison_is_not_trained_on(case: Case, way: Way) -> None:
    assert outcome(case, way) == way.outcome


def test_there_are_many_ways_to_poison_a_fragment() -> None:
    ways = {way.name for case in CASES for way in case.ways}
    assert len(ways) >= 50


CHARGE = SMALL_RUN_STEPS * SLOTS


def entry(number: int, round_: int = 0) -> LogEntry:
    header = fragment(1, number).header
    return LogEntry(number=number, header=header, steps_total=number * CHARGE, size=1, round=round_)


@dataclass
class Stand:
    """Pending entries, the verdict on them, and how often each question was asked."""

    batch: int
    turn: int = 0
    refused: set[int] = field(default_factory=set)
    judged: list[int] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.pending = Pending(self.judge, lambda: (self.turn, frozenset(self.refused)))

    def judge(self, one: LogEntry) -> bool:
        self.judged.append(one.number)
        return one.number not in self.refused

    def makes_batch(self, fragments: int, charge: int) -> bool:
        assert charge == fragments * CHARGE
        self.asked += 1
        return fragments >= self.batch

    def choose(self) -> list[int] | None:
        full = self.pending.choose(self.makes_batch)
        return [one.number for one in self.pending.kept] if full else None


def test_each_of_many_entries_that_arrive_alone_is_judged_once() -> None:
    stand = Stand(batch=400)
    chosen = None
    for number in range(1, 401):
        assert chosen is None
        stand.pending.add(entry(number))
        chosen = stand.choose()
    assert chosen == list(range(1, 401))
    assert stand.judged == list(range(1, 401))
    assert stand.asked <= 3 * 400


def test_kept_entries_are_judged_again_where_the_verdict_may_change() -> None:
    stand = Stand(batch=3)
    for number in (1, 2):
        stand.pending.add(entry(number))
    assert stand.choose() is None
    stand.refused = {1}
    for number in (3, 4):
        stand.pending.add(entry(number))
    assert stand.choose() == [2, 3, 4]
    assert stand.judged == [1, 2, 1, 2, 3, 4]
    stand.turn = 1
    assert stand.choose() == [2, 3, 4]
    assert stand.judged[-3:] == [2, 3, 4]
    stand.pending.add(entry(5))
    stand.pending.discard({3})
    assert stand.choose() == [2, 4, 5]


def test_a_round_takes_its_own_entries_and_leaves_later_ones() -> None:
    stand = Stand(batch=9)
    for number, round_ in ((1, 4), (2, 5), (3, 4), (4, 5)):
        stand.pending.add(entry(number, round_))
    assert [one.number for one in stand.pending.choose_round(4)] == [1, 3]
    stand.pending.take()
    assert [one.number for one in stand.pending.choose_round(5)] == [2, 4]


def test_nothing_after_the_last_entry_of_a_flush_is_kept() -> None:
    stand = Stand(batch=4)
    for number in (1, 2, 3):
        stand.pending.add(entry(number))
    assert stand.choose() is None
    assert not stand.pending.choose(stand.makes_batch, through=2)
    assert [one.number for one in stand.pending.kept] == [1, 2]
    assert stand.pending.charge == 2 * CHARGE
    stand.pending.take()
    for number in (4, 5, 6):
        stand.pending.add(entry(number))
    assert stand.choose() == [3, 4, 5, 6]


def test_whole_batches_before_the_end_of_a_flush_are_chosen_as_usual() -> None:
    stand = Stand(batch=2)
    for number in (1, 2, 3, 4):
        stand.pending.add(entry(number))
    assert stand.pending.choose(stand.makes_batch, through=3)
    assert [one.number for one in stand.pending.kept] == stand.judged == [1, 2]
    stand.pending.take()
    assert not stand.pending.choose(stand.makes_batch, through=3)
    assert [one.number for one in stand.pending.kept] == [3]


CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fragments() -> list[Fragment]:
    policy = small_policy()
    return [Collector(cartpoles(2), session).fragment(policy, 8 + session) for session in (1, 2)]


def test_every_tensor_of_a_batch_is_named() -> None:
    batch = assemble(fragments(), CPU)
    assert len(list(tensors(batch))) == 8 + len(batch.observation) + len(batch.action) + len(
        batch.final_observation
    )


@needs_gpu
def test_a_batch_copied_during_other_work_is_whole() -> None:
    parts, gpu = fragments(), torch.device("cuda", 0)
    upload = Upload(gpu)
    busy = torch.randn((4096, 4096), device=gpu)
    for _ in range(20):
        busy = busy @ busy
        batch = upload.stage(partial(assemble, parts, gpu))
        batch.arrive()
        for one, other in zip(tensors(batch), tensors(assemble(parts, CPU)), strict=True):
            assert torch.equal(one.cpu(), other)
