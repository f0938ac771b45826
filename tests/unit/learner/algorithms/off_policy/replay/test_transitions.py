"""n-step transitions against a loop over steps that is written from their definition."""

from dataclasses import asdict, dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.learner.algorithms.off_policy.memory import transitions
from penstock.learner.algorithms.rows import see
from penstock.policy.recurrent import FrameStack
from tests.support.experience.experience import box
from tests.support.experience.remembering import Actor, entry_of, remembering
from tests.support.experience.replay_fragments import Ends, batch, fragment
from tests.support.experience.steps import read

DISCOUNT = 0.5
STACK = FrameStack(box(1), 1)


@dataclass
class Row:
    """A transition of one-number observations."""

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
    """By the code under test."""
    (one,) = batch(fragment(steps, slots, ends=ends, invalid=invalid)).fragments()
    made = read(transitions(one[1], STACK, discount=DISCOUNT, steps=n), STACK)
    columns = (made.observation["observation"], made.reward, made.discount, made.following["observation"])
    return [Row(*values) for values in zip(*(column.flatten().tolist() for column in columns), strict=True)]


def test_three_steps_by_hand() -> None:
    assert built(4, 1, {(2, 0): "truncated"}, (), 2) == [
        Row(0, 1 + 0.5 * 2, 0.25, 2),
        Row(1, 2 + 0.5 * 3, 0.25, -3),
        Row(2, 3, 0.5, -3),
        Row(3, 4, 0.5, 4),
    ]


def test_a_termination_is_followed_by_nothing_and_a_truncation_by_its_last_observation() -> None:
    assert built(2, 1, {(0, 0): "terminated", (1, 0): "truncated"}, (), 1) == [
        Row(0, 1, 0.0, -1),
        Row(1, 2, 0.5, -2),
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


def test_ragged_fragments_are_taken_apart_without_their_padding() -> None:
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


@pytest.mark.parametrize("n", [1, 4])
def test_the_last_steps_of_a_fragment_look_as_far_as_it_goes(n: int) -> None:
    rows = built(4, 1, {}, (), n)
    assert rows[-1] == Row(3, 4, 0.5, 4)
    assert rows[0].discount == DISCOUNT**n


def test_a_truncated_step_is_followed_by_what_was_allowed_before_it() -> None:
    one = batch(fragment(3, 1, ends={(1, 0): "truncated"}))
    mask = torch.tensor([[True, False], [False, True], [True, True], [True, False]]).unsqueeze(1)
    ((_, part),) = replace(one, observation=one.observation | {"mask/action": mask}).fragments()
    following = read(transitions(part, STACK, discount=0.9, steps=1), STACK).following["mask/action"]
    assert following.tolist() == [[False, True], [False, True], [True, False]]


@pytest.mark.promise("dqn-values-truncated-step")
def test_a_truncated_step_is_followed_by_what_its_last_observation_allows() -> None:
    one = batch(fragment(3, 1, ends={(1, 0): "truncated"}))
    mask = torch.tensor([[True, False], [False, True], [True, True], [True, False]]).unsqueeze(1)
    final = {"mask/action": torch.tensor([[True, False]])}
    known = replace(one, observation=one.observation | {"mask/action": mask}, final_mask=final)
    ((_, part),) = known.fragments()
    following = read(transitions(part, STACK, discount=0.9, steps=1), STACK).following["mask/action"]
    assert following.tolist() == [[False, True], [True, False], [True, False]]


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
