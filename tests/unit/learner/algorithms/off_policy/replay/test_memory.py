"""The ring of transitions: what is in it, what is drawn from it, what a checkpoint brings back."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.learner.algorithms.off_policy.memory import Replay, Sample, Steps, transitions
from penstock.policy.recurrent import FrameStack
from tests.support.experience.experience import box
from tests.support.experience.remembering import Actor, entry_of, remembering
from tests.support.experience.replay_fragments import batch, fragment
from tests.support.experience.steps import read

CPU = torch.device("cpu")
PRIORITISED = 0.6


STACK = FrameStack(box(1), 1)


def replay(capacity: int = 20, how: float | None = None, **changed: Any) -> Replay:
    """A small one."""
    return Replay(
        capacity,
        changed.pop("capacity_bytes", 10**6),
        seed=3,
        device=CPU,
        stack=STACK,
        priority_exponent=how,
        **changed,
    )


def rows(count: int, first: int) -> Steps:
    """`count` transitions whose observations are first, first + 1, ..."""
    ((_, one),) = batch(fragment(count, 1, first=first)).fragments()
    return transitions(one, STACK, discount=0.9, steps=1)


def held(memory: Replay) -> list[float]:
    """Observations by age."""
    index = torch.arange(memory.size)
    places = (index + memory.state()[1]["first"]) % memory.capacity
    return [] if memory.size == 0 else memory.rows(places).observation["observation"].flatten().tolist()


def test_the_oldest_entries_make_room_whole() -> None:
    memory = replay(capacity=10)
    for number in range(1, 5):
        memory.insert(number, 100, rows(4, 10 * number))
    assert [entry.number for entry in memory.entries] == [3, 4]
    assert held(memory) == [30, 31, 32, 33, 40, 41, 42, 43]
    assert memory.retain_from() == 3


def test_the_oldest_entries_make_room_by_bytes() -> None:
    memory = replay(capacity=100, capacity_bytes=250)
    for number in range(1, 5):
        memory.insert(number, 100, rows(4, 10 * number))
    assert [entry.number for entry in memory.entries] == [3, 4]


def test_an_entry_without_experience_is_not_kept() -> None:
    ((_, one),) = batch(fragment(2, 1, invalid=((0, 0), (1, 0)))).fragments()
    memory = replay()
    memory.insert(1, 100, transitions(one, STACK, discount=0.9, steps=1))
    assert (memory.size, memory.retain_from()) == (0, None)


def test_an_entry_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="log entry 7 has 4 transitions in 10 bytes, replay holds 3"):
        replay(capacity=3).insert(7, 10, rows(4, 0))


def test_what_is_withdrawn_is_never_drawn() -> None:
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
    memory, naive = replay(capacity=12, capacity_bytes=100), list[tuple[int, int, int]]()
    for number, (count, size) in enumerate(entries, 1):
        memory.insert(number, size, rows(count, 10 * number))
        naive.append((number, count, size))
        while sum(count for _, count, _ in naive) > 12 or sum(size for *_, size in naive) > 100:
            del naive[0]
    assert [(entry.number, entry.rows, entry.size) for entry in memory.entries] == naive
    assert held(memory) == [10 * number + row for number, count, _ in naive for row in range(count)]


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize("how", [None, PRIORITISED])
@pytest.mark.parametrize("gone", [3, 4, 6])
def test_an_entry_that_is_removed_leaves_the_others_as_they_were(gone: int, how: float | None) -> None:
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
    """How often each place of the ring was drawn."""
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


def test_new_transitions_come_with_the_largest_priority_there_was() -> None:
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


# ---------------------------------------------------------------- checkpoints


def recalled(memory: Replay, parts: dict[int, Steps]) -> int:
    """Read all of `parts` again, in order."""
    for number, part in sorted(parts.items()):
        if memory.awaits(number):
            memory.reload(number, part)
    return memory.end_reload()


def same(one: Sample, other: Sample) -> bool:
    """Bit by bit."""
    mine, theirs = one.transitions.observation["observation"], other.transitions.observation["observation"]
    return (
        torch.equal(mine, theirs)
        and torch.equal(one.index, other.index)
        and torch.equal(one.weight, other.weight)
    )


@pytest.mark.parametrize("how", [None, PRIORITISED])
def test_what_was_read_again_goes_on_bit_by_bit(how: float | None) -> None:
    parts = {number: rows(3, 10 * number) for number in range(1, 9)}
    first = replay(capacity=13, how=how)
    for number in range(1, 7):
        first.insert(number, 10, parts[number])
        sample = first.sample(5, importance_exponent=0.4)
        first.set_errors(sample.index, sample.index.float())
    tensors, numbers = first.state()
    assert all(tensor.numel() < 20 for name, tensor in tensors.items() if name != "generator"), "no payloads"
    second = replay(capacity=13, how=how)
    second.load(tensors, numbers)
    assert second.retain_from() == first.retain_from() == 3
    assert recalled(second, parts) == 0
    assert second.state()[0].keys() == tensors.keys()
    for number in (7, 8):
        for memory in (first, second):
            memory.insert(number, 10, parts[number])
        one, other = (memory.sample(7, importance_exponent=0.5) for memory in (first, second))
        assert same(one, other)
        for memory in (first, second):
            memory.set_errors(one.index, one.index.float() + 1)
    assert held(first) == held(second)


@pytest.mark.parametrize("how", [None, PRIORITISED])
def test_a_state_that_was_not_recalled_yet_is_still_whole(how: float | None) -> None:
    first = replay(how=how)
    for number in (1, 2, 3):
        first.insert(number, 10, rows(3, 10 * number))
    tensors, numbers = first.state()
    second = replay(how=how)
    second.load(tensors, numbers)
    second.reload(1, rows(3, 10))
    again, _ = second.state()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_entries_that_do_not_come_are_counted() -> None:
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


def test_an_entry_that_is_not_what_it_was_is_named() -> None:
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
    with pytest.raises(ValueError, match=r"of 20 transitions, algorithm\.capacity=21"):
        replay(capacity=21).load(*first.state())


# ---------------------------------------------------------------- frames


def plain(memory: Replay) -> dict[str, list[float]]:
    """All that it holds, oldest first."""
    places = (torch.arange(memory.size) + memory.state()[1]["first"]) % memory.capacity
    rows = memory.rows(places)
    return {
        f"{kind}/{path}": tensor.flatten().tolist()
        for kind, part in (("before", rows.observation), ("after", rows.following))
        for path, tensor in part.items()
    }


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_stacks_stay_what_they_were_while_entries_come_and_go(data: st.DataObject) -> None:
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
def test_frames_are_held_once() -> None:
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
