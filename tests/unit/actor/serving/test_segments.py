"""A flush cuts an open segment where everything is known, and nothing of it is lost or doubled."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.actor.serving.episodes import Segment, SegmentBuilder


def row(number: int) -> dict[str, np.ndarray]:
    """An observation that names its step."""
    return {"observation": np.full((1, 2), number, np.float32)}


def stepped(builder: SegmentBuilder, number: int) -> Segment | None:
    """One step whose numbers all name it."""
    done = builder.step(row(number), {"action": np.full((1,), number)}, -float(number), (1, 0), 0.0, {})
    assert builder.open is not None
    builder.open.add_reward(number, float(number))
    builder.open.bytes += 10
    return done


@given(length=st.integers(1, 12), flushes=st.sets(st.integers(0, 12)))
def test_the_same_steps_leave_however_often_they_are_cut(length: int, flushes: set[int]) -> None:
    builder = SegmentBuilder(lane=0, number=3, unroll_length=5, max_age_s=100.0)
    segments: list[Segment | None] = []
    for number in range(length):
        segments.append(stepped(builder, number))
        if number in flushes:
            segments.append(builder.cut())
    segments.append(builder.end(terminated=True, final=row(length)))
    found = [segment for segment in segments if segment is not None]
    steps = [number for segment in found for number in segment.rewards]
    assert steps == list(range(length))
    assert [-number for segment in found for number in segment.log_probs] == steps
    assert sum(segment.bytes for segment in found) == 10 * length
    for segment in found:
        first = segment.slot.first_step
        seen = [int(one["observation"][0, 0]) for one in segment.observations]
        assert seen == list(range(first, first + segment.steps + 1))
        assert segment.steps <= 5


def test_a_single_step_and_a_policy_that_remembers_are_not_cut() -> None:
    builder = SegmentBuilder(lane=0, number=3, unroll_length=5, max_age_s=100.0)
    assert builder.cut() is None
    stepped(builder, 0)
    assert builder.cut() is None
    remembering = SegmentBuilder(lane=0, number=3, unroll_length=5, max_age_s=100.0)
    state = {"state/h": np.zeros((1, 4), np.float32)}
    for number in range(3):
        remembering.step(row(number), {"action": np.zeros(1)}, 0.0, (1, 0), 0.0, state)
    assert remembering.cut() is None
    assert remembering.open is not None
    assert remembering.open.steps == 3
