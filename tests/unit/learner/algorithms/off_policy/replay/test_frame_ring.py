"""The ring of frames: what is kept stays under its number, whatever comes and goes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.learner.algorithms.off_policy.memory import FrameRing

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), max_size=20))
def test_frames_keep_their_numbers(steps: list[tuple[int, int]]) -> None:
    ring, spans, value = FrameRing(4, CPU), list[tuple[int, int]](), 0
    expected: dict[int, float] = {}
    for count, gone in steps:
        frames = torch.arange(value, value + count, dtype=torch.float32)
        start = ring.append({"a": frames, "b": -frames[:, None]})
        expected |= {start + index: float(value + index) for index in range(count)}
        spans.append((start, ring.end))
        value += count
        spans = spans[min(gone, len(spans) - 1) :]
        ring.keep(spans[0][0], ring.end)
        numbers = torch.arange(ring.first, ring.end)
        assert ring.at("a", numbers).tolist() == [expected[number] for number in numbers.tolist()]
        assert ring.at("b", numbers[:, None]).flatten().tolist() == (-ring.at("a", numbers)).tolist()
