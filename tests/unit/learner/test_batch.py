"""Fragments side by side, and fragments that cannot be trained on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.batch import assemble, check_meaning
from penstock.wire.fragment import Slot, WeightSpan
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
    """Every tensor lies in its columns; what was padded is 0 and not valid."""
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
    """Each belongs to a step that ended, and holds that episode's last observation."""
    parts = fragments()
    batch = assemble(parts, CPU)
    ended = batch.terminated | batch.truncated
    assert len(batch.final_slot) == int(ended.sum()) > 0
    assert ended[batch.final_step, batch.final_slot].all()
    expected = np.concatenate([arrays["final/observation"] for _, arrays in parts])
    np.testing.assert_array_equal(batch.final_observation["observation"], expected)


def test_steps_that_are_not_experience_count_for_nothing() -> None:
    """Their reward, log-probability and flags are cleared."""
    header, arrays = good()
    valid = arrays["valid"].copy()
    valid[2] = False
    batch = assemble([(header, arrays | {"valid": valid, "truncated": np.logical_not(valid)})], CPU)
    assert not batch.reward[2].any()
    assert not batch.log_prob[2].any()
    assert not batch.truncated[2].any()


def test_staleness_counts_the_oldest_weights_of_a_fragment() -> None:
    """A publish in the middle of generation does not hide the older part."""
    header, arrays = good()
    spans = (WeightSpan(0, 0, 3, 7, 7), WeightSpan(0, 3, 3, 9, 8))
    assert assemble([(replace(header, weights=spans), arrays)], CPU).update.tolist() == [7, 7]


def test_no_fragments_are_refused() -> None:
    """There is no empty batch."""
    with pytest.raises(ValueError, match="no fragments"):
        assemble([], CPU)


def test_a_good_fragment_passes() -> None:
    """Also with NaN where a step is not experience."""
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
    """The error names the tensor."""
    header, arrays = good()
    changed = arrays[name].copy()
    changed.flat[0] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays | {name: changed})


def test_slots_name_session_and_environment() -> None:
    """Slot ids are the actor's own."""
    header, arrays = good()
    named = replace(header, slots=(Slot(4, 0, 0), Slot(2, 0, 0)))
    assert assemble([(named, arrays)], CPU).slots == ((1, 4), (1, 2))


def masked_fragment() -> Fragment:
    """Of a policy that remembers, under masks."""
    fragment = Actor(remembering(recurrent="lstm"), masked=True).fragment(6)
    return fragment.header, {name: array.copy() for name, array in fragment.arrays().items()}


def test_masks_and_state_lie_in_their_columns() -> None:
    """State as it was sent, masks and beginnings padded behind the last row."""
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mask/action", False, "mask/action: allows nothing at step 0 of slot 0"),
        ("action", 9, "mask/action: forbids the action that was taken at step"),
        ("state/actor/c", np.inf, "state/actor/c: holds NaN or infinity"),
    ],
)
def test_what_no_update_could_use_of_masks_and_state_is_refused(name: str, value: Any, message: str) -> None:
    """The log-probability of what is forbidden is no number to learn from."""
    header, arrays = masked_fragment()
    check_meaning(header, arrays)
    arrays["mask/action"][:] = [True, True, name != "action"]
    arrays[name][:] = value
    with pytest.raises(ValueError, match=message):
        check_meaning(header, arrays)
