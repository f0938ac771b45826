"""Fragments side by side."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.learner.batch import assemble
from penstock.protocol.fragment import Slot, WeightSpan
from tests.support.experience.experience import Collector, Fragment, cartpoles, small_policy
from tests.support.experience.remembering import Actor, batch_of, remembering

CPU = torch.device("cpu")


def fragments() -> list[Fragment]:
    """Of 5, 12 and 9 steps with 2, 1 and 3 slots; the poles fall within ten steps or so."""
    policy = small_policy()
    shapes = ((5, 2), (12, 1), (9, 3))
    return [
        Collector(cartpoles(count, max_episode_steps=8), session).fragment(policy, steps, update=10 + session)
        for session, (steps, count) in enumerate(shapes)
    ]


def good() -> Fragment:
    """One fragment with a truncated step."""
    return Collector(cartpoles(2, max_episode_steps=4)).fragment(small_policy(), 6)


def test_ragged_fragments_are_padded_and_not_valid_there() -> None:
    parts = fragments()
    batch = assemble(parts, CPU)
    assert batch.valid.shape == (12, 6)
    assert batch.observation["observation"].shape == (13, 6, 4)
    start = 0
    for header, arrays in parts:
        columns = slice(start, start + len(header.slots))
        start = columns.stop
        for name in ("reward", "terminated", "truncated", "valid", "log_prob"):
            found = getattr(batch, name)[:, columns].numpy()
            np.testing.assert_array_equal(found[: header.steps], arrays[name])
            assert not found[header.steps :].any()
        whole = batch.observation["observation"][: header.steps + 1, columns]
        np.testing.assert_array_equal(whole, arrays["observation"])
    assert batch.update.tolist() == [10, 10, 11, 12, 12, 12]
    assert batch.slots == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))


def test_final_rows_point_at_the_columns_of_the_batch() -> None:
    parts = fragments()
    batch = assemble(parts, CPU)
    ended = batch.terminated | batch.truncated
    assert len(batch.final_slot) == int(ended.sum()) > 0
    assert ended[batch.final_step, batch.final_slot].all()
    expected = np.concatenate([arrays["final/observation"] for _, arrays in parts])
    np.testing.assert_array_equal(batch.final_observation["observation"], expected)


def test_steps_that_are_not_experience_count_for_nothing() -> None:
    header, arrays = good()
    valid = arrays["valid"].copy()
    valid[2] = False
    batch = assemble([(header, arrays | {"valid": valid, "truncated": np.logical_not(valid)})], CPU)
    assert not batch.reward[2].any()
    assert not batch.log_prob[2].any()
    assert not batch.truncated[2].any()


def test_staleness_counts_the_oldest_weights_of_a_fragment() -> None:
    header, arrays = good()
    spans = (WeightSpan(0, 0, 3, 7, 7), WeightSpan(0, 3, 3, 9, 8))
    assert assemble([(replace(header, weights=spans), arrays)], CPU).update.tolist() == [7, 7]


def test_no_fragments_are_refused() -> None:
    with pytest.raises(ValueError, match="no fragments"):
        assemble([], CPU)


def test_slots_name_session_and_environment() -> None:
    header, arrays = good()
    named = replace(header, slots=(Slot(4, 0, 0), Slot(2, 0, 0)))
    assert assemble([(named, arrays)], CPU).slots == ((1, 4), (1, 2))


def test_masks_and_state_lie_in_their_columns() -> None:
    actor = Actor(remembering(recurrent="lstm"), masked=True)
    first, second = actor.fragment(6), actor.fragment(2)
    batch = batch_of([first, second])
    for columns, fragment in ((slice(0, 3), first), (slice(3, 6), second)):
        arrays, steps = fragment.arrays(), fragment.header.steps
        assert batch.begins is not None
        np.testing.assert_array_equal(batch.begins[: steps + 1, columns], arrays["begins"])
        np.testing.assert_array_equal(
            batch.observation["mask/action"][: steps + 1, columns], arrays["mask/action"]
        )
        for name, state in batch.state.items():
            np.testing.assert_array_equal(state[columns], arrays[name])
    assert batch.begins is not None
    assert not batch.begins[3:, 3:].any()
