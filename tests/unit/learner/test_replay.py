import math
from collections import Counter
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.learner.algorithms.off_policy.memory import (
    Replay,
    Steps,
    SumTree,
    transitions,
)
from penstock.learner.algorithms.off_policy.off_policy import SampleToInsertRatio
from penstock.learner.algorithms.rows import see
from penstock.policy.recurrent import FrameStack
from tests.support.experience.experience import box
from tests.support.experience.remembering import Actor, entry_of, remembering
from tests.support.experience.replay_worlds import Ends, batch, fragment, read

CPU = torch.device("cpu")


PRIORITISED = 0.6


STACK = FrameStack(box(1), 1)


def replay(capacity: int = 20, how: float | None = None, most_bytes: int = 10**6) -> Replay:
    return Replay(capacity, most_bytes, seed=3, device=CPU, stack=STACK, priority_exponent=how)


def rows(count: int, first: int) -> Steps:
    ((_, one),) = batch(fragment(count, 1, first=first)).fragments()
    return transitions(one, STACK, discount=0.9, steps=1)


def held(memory: Replay) -> list[float]:
    index = torch.arange(memory.size)
    places = (index + memory.state()[1]["first"]) % memory.capacity
    return [] if memory.size == 0 else memory.rows(places).observation["observation"].flatten().tolist()


def test_an_entry_without_experience_is_not_kept() -> None:
    ((_, one),) = batch(fragment(2, 1, invalid=((0, 0), (1, 0)))).fragments()
    memory = replay()
    memory.insert(1, 100, transitions(one, STACK, discount=0.9, steps=1))
    assert (memory.size, memory.retain_from()) == (0, None)


def test_an_entry_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="log entry 7 has 4 transitions in 10 bytes, replay holds 3"):
        replay(capacity=3).insert(7, 10, rows(4, 0))


def test_withdrawn_entries_are_never_drawn() -> None:
    memory = replay(how=PRIORITISED)
    for number in (1, 2):
        memory.insert(number, 10, rows(5, 10 * number))
    memory.withdraw(1)
    assert len(memory.entries) == 2
    memory.withdraw(2)
    drawn = memory.sample(200, importance_exponent=0.4).transitions.observation["observation"]
    assert set(drawn.flatten().tolist()) <= {10.0, 11.0, 12.0, 13.0, 14.0}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 60)), max_size=30))
@settings(max_examples=50)
def test_every_history_agrees_with_a_list(entries: list[tuple[int, int]]) -> None:
    memory, naive = replay(capacity=12, most_bytes=100), list[tuple[int, int, int]]()
    for number, (count, size) in enumerate(entries, 1):
        memory.insert(number, size, rows(count, 10 * number))
        naive.append((number, count, size))
        while sum(count for _, count, _ in naive) > 12 or sum(size for *_, size in naive) > 100:
            del naive[0]
    assert [(entry.number, entry.rows, entry.size) for entry in memory.entries] == naive
    assert memory.retain_from() == (naive[0][0] if naive else None)
    assert held(memory) == [10 * number + row for number, count, _ in naive for row in range(count)]


@pytest.mark.parametrize("how", [None, PRIORITISED])
@pytest.mark.parametrize("gone", [3, 4, 6])
def test_removing_an_entry_leaves_the_others_unchanged(gone: int, how: float | None) -> None:
    memory = replay(capacity=11, how=how)
    for number, count in ((1, 4), (2, 3), (3, 2), (4, 4), (5, 2), (6, 3)):
        memory.insert(number, 100, rows(count, 10 * number))
    kept = [row for row in held(memory) if row // 10 != gone]
    assert memory.remove(gone)
    assert not memory.remove(gone)
    assert held(memory) == kept
    assert gone not in [entry.number for entry in memory.entries]
    drawn_rows = memory.sample(200, importance_exponent=0.4).transitions.observation["observation"]
    assert set(drawn_rows.flatten().tolist()) == set(kept)
    memory.insert(7, 100, rows(2, 70))
    assert held(memory) == [*kept, 70, 71]


def chi_square(counts: Counter[int], shares: list[float]) -> float:
    """Σ (observed − expected)² / expected."""
    total = sum(counts.values())
    return sum((counts[index] - total * share) ** 2 / (total * share) for index, share in enumerate(shares))


def drawn(memory: Replay, batches: int, count: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for _ in range(batches):
        found.update(memory.sample(count, importance_exponent=0.4).index.tolist())
    return found


def test_uniform_draws_are_uniform() -> None:
    memory = replay()
    memory.insert(1, 10, rows(10, 0))
    assert chi_square(drawn(memory, 200, 100), [0.1] * 10) < 27.9


def test_prioritised_draws_are_proportional_to_the_priority() -> None:
    memory = replay(how=PRIORITISED)
    memory.insert(1, 10, rows(10, 0))
    memory.set_errors(torch.arange(10), torch.arange(10.0))
    powers = [(error + 1e-6) ** 0.6 for error in range(10)]
    shares = [power / sum(powers) for power in powers]
    counts = drawn(memory, 200, 100)
    # The first has next to no share: an expectation below 5 belongs with its neighbour.
    merged = Counter({0: counts[0] + counts[1]} | {place - 1: counts[place] for place in range(2, 10)})
    assert chi_square(merged, [shares[0] + shares[1], *shares[2:]]) < 26.1


def test_a_stratified_batch_draws_each_transition_as_often_as_its_share_to_within_one() -> None:
    memory = replay(how=PRIORITISED)
    memory.insert(1, 10, rows(8, 0))
    for _ in range(50):
        assert memory.sample(8, importance_exponent=0.4).index.tolist() == list(range(8))


def test_importance_weights_are_those_of_the_paper() -> None:
    memory = replay(how=PRIORITISED)
    memory.insert(1, 10, rows(4, 0))
    memory.set_errors(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    sample = memory.sample(64, importance_exponent=0.5)
    powers = [(error + 1e-6) ** 0.6 for error in (1, 2, 3, 4)]
    by_place = [(4 * power / sum(powers)) ** -0.5 for power in powers]
    largest = max(by_place[place] for place in sample.index.tolist())
    expected = [by_place[place] / largest for place in sample.index.tolist()]
    torch.testing.assert_close(sample.weight, torch.tensor(expected))


def test_new_transitions_get_the_largest_priority_so_far() -> None:
    memory = replay(how=PRIORITISED)
    memory.insert(1, 10, rows(2, 0))
    memory.set_errors(torch.tensor([0, 1]), torch.tensor([9.0, 0.5]))
    memory.set_errors(torch.tensor([0]), torch.tensor([0.1]))
    memory.insert(2, 10, rows(1, 10))
    counts = drawn(memory, 100, 30)
    powers = [0.1**0.6, 0.5**0.6, 9**0.6]
    assert chi_square(counts, [power / sum(powers) for power in powers]) < 13.8


def test_an_error_that_is_not_finite_does_not_stay() -> None:
    memory = replay(how=PRIORITISED)
    memory.insert(1, 10, rows(3, 0))
    memory.set_errors(torch.arange(3), torch.tensor([math.nan, math.inf, 1.0]))
    weight = memory.sample(16, importance_exponent=0.4).weight
    assert weight.isfinite().all()


def recalled(memory: Replay, parts: dict[int, Steps]) -> int:
    for number, part in sorted(parts.items()):
        if memory.awaits(number):
            memory.reload(number, part)
    return memory.end_reload()


@pytest.mark.parametrize("how", [None, PRIORITISED])
def test_a_state_not_yet_restored_is_still_whole(how: float | None) -> None:
    first = replay(how=how)
    for number in (1, 2, 3):
        first.insert(number, 10, rows(3, 10 * number))
    tensors, numbers = first.state()
    assert all(tensor.numel() < 20 for name, tensor in tensors.items() if name != "generator"), "no payloads"
    second = replay(how=how)
    second.load(tensors, numbers)
    second.reload(1, rows(3, 10))
    again, _ = second.state()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_missing_entries_are_counted() -> None:
    first = replay(how=PRIORITISED)
    parts = {number: rows(3, 10 * number) for number in (1, 2, 3, 4)}
    for number, part in parts.items():
        first.insert(number, 10, part)
    second = replay(how=PRIORITISED)
    second.load(*first.state())
    del parts[2], parts[4]
    assert recalled(second, parts) == 2
    assert held(second) == [10, 11, 12, 30, 31, 32]
    assert second.retain_from() == 1


def test_a_changed_entry_is_named() -> None:
    first = replay()
    first.insert(5, 10, rows(3, 0))
    second = replay()
    second.load(*first.state())
    with pytest.raises(ValueError, match="log entry 5: 2 transitions, 3 when it entered"):
        second.reload(5, rows(2, 0))


def test_a_state_of_another_kind_of_replay_is_refused() -> None:
    first = replay()
    first.insert(1, 10, rows(3, 0))
    with pytest.raises(ValueError, match="replay/priorities: missing"):
        replay(how=PRIORITISED).load(*first.state())
    with pytest.raises(ValueError, match=r"algorithm\.capacity=20, not 21"):
        replay(capacity=21).load(*first.state())


def plain(memory: Replay) -> dict[str, list[float]]:
    places = (torch.arange(memory.size) + memory.state()[1]["first"]) % memory.capacity
    rows = memory.rows(places)
    return {
        f"{kind}/{path}": tensor.flatten().tolist()
        for kind, part in (("before", rows.observation), ("after", rows.following))
        for path, tensor in part.items()
    }


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_stacks_are_unchanged_while_entries_are_added_and_removed(data: st.DataObject) -> None:
    policy = remembering(frame_stack=3)
    stack, actor = policy.memory.frames, Actor(policy, slots=2, seed=data.draw(st.integers(0, 99)))
    memory = Replay(40, 10**6, seed=0, device=CPU, stack=stack)
    known: dict[int, Steps] = {}
    for number in range(1, data.draw(st.integers(1, 12))):
        ((_, one),) = entry_of(actor.fragment(data.draw(st.integers(1, 8)))).fragments()
        known[number] = transitions(one, stack, discount=0.9, steps=2)
        memory.insert(number, 10, known[number])
        if memory.entries and data.draw(st.integers(0, 3)) == 0:
            memory.withdraw(memory.entries[-1].number)
        if memory.entries and data.draw(st.integers(0, 3)) == 0:
            memory.remove(data.draw(st.sampled_from(memory.entries)).number)
        if memory.size:
            held = [read(known[entry.number], stack) for entry in memory.entries]
            expected = {
                f"{kind}/{path}": [
                    number for row in held for number in getattr(row, field)[path].flatten().tolist()
                ]
                for kind, field in (("before", "observation"), ("after", "following"))
                for path in getattr(held[0], field)
            }
            assert plain(memory) == expected


@pytest.mark.promise("replay-holds-observation-once")
def test_frames_are_stored_once() -> None:
    policy = remembering(frame_stack=4)
    stack, actor = policy.memory.frames, Actor(policy, slots=2)
    memory = Replay(64, 10**6, seed=0, device=CPU, stack=stack)
    for number in range(1, 40):
        ((_, one),) = entry_of(actor.fragment(8)).fragments()
        memory.insert(number, 10, transitions(one, stack, discount=0.9, steps=1))
    frame_bytes = 3 * 4
    fragment_frames = 2 * (8 + 1) + 2 * 3
    at_most = 64 // 16 * (fragment_frames + 16) * 1.25
    assert memory.frame_bytes <= at_most * frame_bytes


def limiter(**changed: float) -> SampleToInsertRatio:
    given = {"ratio": 0.5, "minimum": 100, "buffer_steps": 20} | changed
    return SampleToInsertRatio(**given)  # type: ignore[arg-type]


def test_nothing_is_drawn_before_there_is_enough() -> None:
    given = limiter()
    assert [advance(given, steps) for steps in (99, 1)] == [0, 0]
    assert given.due == -10


def test_the_first_steps_drawn_are_no_more_than_later_ones() -> None:
    given = limiter(buffer_steps=500)
    made = [advance(given, 10) for _ in range(40)]
    assert made == [0] * 10 + [5] * 30


def test_the_ratio_holds_over_time() -> None:
    given = limiter()
    drawn = sum(advance(given, 10) for _ in range(1000))
    assert drawn == (10_000 - 100) // 2


def test_steps_too_far_ahead_may_not_enter() -> None:
    given = limiter(buffer_steps=20)
    given.inserted(140)
    assert not given.may_insert(1)
    with pytest.raises(RuntimeError, match="1 steps entered with 10 gradient steps due"):
        given.inserted(1)


def test_a_ratio_far_below_one_needs_a_buffer_of_half_its_inverse() -> None:
    given = limiter(ratio=0.001, buffer_steps=400)
    with pytest.raises(ValueError, match="give at least 504"):
        given.check(insertion=8, capacity=10_000)
    limiter(ratio=0.001, buffer_steps=504).check(insertion=8, capacity=10_000)


@settings(max_examples=30)
@given(
    ratio=st.floats(0.0001, 100),
    minimum=st.integers(1, 500),
    buffer=st.integers(1, 2000),
    insertion=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 300), min_size=5, max_size=30),
)
def test_accepted_limits_never_block(
    ratio: float, minimum: int, buffer: int, insertion: int, sizes: list[int]
) -> None:
    given = SampleToInsertRatio(ratio=ratio, minimum=minimum, buffer_steps=buffer)
    capacity = minimum + insertion
    try:
        given.check(insertion=insertion, capacity=capacity)
    except ValueError:
        assume(False)
    size = 0
    for steps in sizes:
        entering = min(steps, insertion)
        given.inserted(entering)
        size = min(capacity, size + entering)
        while given.may_draw(size):
            given.drawn()
    assert given.may_insert(insertion)


def advance(given: SampleToInsertRatio, steps: int) -> int:
    given.inserted(steps)
    drawn = 0
    while given.may_draw(given.counts.inserted):
        given.drawn()
        drawn += 1
    return drawn


@pytest.mark.parametrize("ratio", [0.05, 0.25, 1.0, 4.0])
def test_a_ratio_changed_at_a_resume_applies_from_then_on(ratio: float) -> None:
    before = limiter()
    for _ in range(100_000):
        advance(before, 10)
    after = limiter(ratio=ratio)
    after.counts = before.counts
    after.rebase()
    made = [advance(after, 10) for _ in range(100)]
    assert sum(made) == pytest.approx(1000 * ratio, abs=1)
    assert max(made) <= 10 * ratio + 1


def test_a_resume_with_equal_settings_keeps_the_limiter() -> None:
    given = limiter(ratio=0.3)
    for _ in range(40):
        advance(given, 7)
        due = given.due
        given.rebase()
        assert given.due == due


PRIORITIES = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)


class Naive:
    def __init__(self, capacity: int) -> None:
        self.priorities = [0.0] * capacity

    def find(self, mass: float) -> int:
        """The first leaf at whose end more than `mass` is behind."""
        last = 0
        for index, priority in enumerate(self.priorities):
            if priority > 0 and mass < priority:
                return index
            mass -= priority
            last = index if priority > 0 else last
        return last


@given(st.data())
def test_tree_every_history_agrees_with_a_list(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 40))
    tree, naive = SumTree(capacity, CPU), Naive(capacity)
    for _ in range(data.draw(st.integers(1, 5))):
        changed = data.draw(st.dictionaries(st.integers(0, capacity - 1), st.integers(0, 100), min_size=1))
        for index, priority in changed.items():
            naive.priorities[index] = float(priority)
        tree.set(torch.tensor(list(changed)), torch.tensor(list(changed.values())))
        assert tree.get(torch.arange(capacity)).tolist() == naive.priorities
        total = sum(naive.priorities)
        assert tree.total.item() == total
        if total:
            # Whole priorities and halves have no rounding, so that both sides must agree exactly.
            masses = [half / 2 for half in range(int(2 * total))][:200]
            found = tree.find(torch.tensor(masses, dtype=torch.float64)).tolist()
            assert found == [naive.find(mass) for mass in masses]


@given(
    st.lists(PRIORITIES, min_size=1, max_size=60),
    st.lists(st.floats(0, 1.0000001), min_size=1, max_size=20),
)
def test_a_leaf_without_priority_is_never_found(priorities: list[float], shares: list[float]) -> None:
    if not any(priorities):
        return
    tree = SumTree(len(priorities), CPU)
    tree.set(torch.arange(len(priorities)), torch.tensor(priorities, dtype=torch.float64))
    found = tree.find(torch.tensor(shares, dtype=torch.float64) * tree.total)
    assert all(priorities[index] > 0 for index in found.tolist())


def test_the_total_stays_exact_over_many_changes() -> None:
    generator = np.random.default_rng(0)
    tree = SumTree(1000, CPU)
    priorities = np.zeros(1000)
    for _ in range(300):
        index = generator.choice(1000, 64, replace=False)
        priorities[index] = generator.random(64) * 10.0 ** generator.integers(-6, 6)
        tree.set(torch.from_numpy(index), torch.from_numpy(priorities[index]))
    fresh = SumTree(1000, CPU)
    fresh.set(torch.arange(1000), torch.from_numpy(priorities))
    assert tree.total.item() == fresh.total.item()


DISCOUNT = 0.5


@dataclass
class Row:
    observation: float
    reward: float
    discount: float
    following: float


def walked(steps: int, slots: int, ends: Ends, invalid: tuple[tuple[int, int], ...], n: int) -> list[Row]:
    """Step by step: reward of row t is t + 1 + 100·i."""
    rows = []
    for t in range(steps):
        for i in range(slots):
            if (t, i) in invalid:
                continue
            reward, factor, at = 0.0, 1.0, t
            while True:
                reward += factor * (1 + at + 100 * i)
                factor *= DISCOUNT
                end = ends.get((at, i))
                following = float(at + 1 + 100 * i)
                if end is not None:
                    following = -following
                    factor = 0.0 if end == "terminated" else factor
                    break
                if at + 1 - t == n or at + 1 == steps or (at + 1, i) in invalid:
                    break
                at += 1
            rows.append(Row(float(t + 100 * i), reward, factor, following))
    return rows


def built(steps: int, slots: int, ends: Ends, invalid: tuple[tuple[int, int], ...], n: int) -> list[Row]:
    (one,) = batch(fragment(steps, slots, ends=ends, invalid=invalid)).fragments()
    made = read(transitions(one[1], STACK, discount=DISCOUNT, steps=n), STACK)
    columns = (made.observation["observation"], made.reward, made.discount, made.following["observation"])
    return [Row(*values) for values in zip(*(column.flatten().tolist() for column in columns), strict=True)]


def test_three_steps_equal_a_calculation_by_hand() -> None:
    assert built(4, 1, {(2, 0): "truncated"}, (), 2) == [
        Row(0, 1 + 0.5 * 2, 0.25, 2),
        Row(1, 2 + 0.5 * 3, 0.25, -3),
        Row(2, 3, 0.5, -3),
        Row(3, 4, 0.5, 4),
    ]


@given(st.data())
def test_every_fragment_agrees_with_the_loop(data: st.DataObject) -> None:
    steps, slots, n = (data.draw(st.integers(1, high)) for high in (7, 3, 6))
    places = st.tuples(st.integers(0, steps - 1), st.integers(0, slots - 1))
    invalid = tuple(data.draw(st.sets(places, max_size=4)))
    how = st.sampled_from(["terminated", "truncated"])
    ends = {
        place: end
        for place, end in data.draw(st.dictionaries(places, how, max_size=5)).items()
        if place not in invalid
    }
    assert built(steps, slots, ends, invalid, n) == walked(steps, slots, ends, invalid, n)


def test_ragged_fragments_are_split_without_their_padding() -> None:
    parts = [
        fragment(2, 2, ends={(1, 1): "truncated"}),
        fragment(5, 1, ends={(4, 0): "terminated"}, first=50),
    ]
    together = list(batch(*parts).fragments())
    assert [(source.number, source.steps, source.columns) for source, _ in together] == [(1, 2, 2), (2, 5, 1)]
    for part, (_, one) in zip(parts, together, strict=True):
        (alone,) = batch(part).fragments()
        first, second = (
            read(transitions(of, STACK, discount=DISCOUNT, steps=3), STACK) for of in (one, alone[1])
        )
        torch.testing.assert_close(asdict(first), asdict(second), rtol=0, atol=0)
        assert first.observation["observation"].shape == (part[0].charge, 1)


@pytest.mark.promise("dqn-values-truncated-step")
def test_a_truncated_step_uses_the_mask_of_its_last_observation() -> None:
    one = batch(fragment(3, 1, ends={(1, 0): "truncated"}))
    mask = torch.tensor([[True, False], [False, True], [True, True], [True, False]]).unsqueeze(1)
    for told in (None, [True, False]):
        final = {} if told is None else {"mask/action": torch.tensor([told])}
        known = replace(one, observation=one.observation | {"mask/action": mask}, final_mask=final)
        ((_, part),) = known.fragments()
        following = read(transitions(part, STACK, discount=0.9, steps=1), STACK).following["mask/action"]
        # Without a mask of the last observation the mask before it counts.
        assert following.tolist() == [[False, True], told or [False, True], [True, False]]


@pytest.mark.promise("replay-holds-observation-once")
@pytest.mark.parametrize("masked", [False, True])
def test_stacks_are_those_that_the_policy_acts_on(*, masked: bool) -> None:
    policy = remembering(frame_stack=3, activation="tanh")
    stack, actor = policy.memory.frames, Actor(policy, slots=2, seed=5, masked=masked, final_masks=masked)
    for steps in (8, 1, 3, 8):
        made = entry_of(actor.fragment(steps))
        look, valid = see(policy, made), made.valid.flatten()
        ((_, one),) = made.fragments()
        found = transitions(one, stack, discount=0.9, steps=1)
        assert len(found.frames["observation"]) == 2 * (steps + 1) + len(made.final_slot) + 2 * 2
        rows = read(found, stack)
        seen = policy.read(rows.observation)
        torch.testing.assert_close(seen.vector, look.inputs.vector[: valid.numel()][valid])
        after = look.inputs.vector.reshape(steps + 1, 2, -1)[1:].clone()
        if look.lasts is not None:
            after[made.final_step, made.final_slot] = look.lasts.vector
        torch.testing.assert_close(policy.read(rows.following).vector, after.flatten(0, 1)[valid])
