"""What a pass is expected to take: by its size, not in proportion to its rows."""

import pytest

from penstock.actor.serving.batcher import PassCost


def test_a_large_pass_is_not_as_many_small_ones() -> None:
    cost = PassCost()
    cost.note(1, 0.0005)
    cost.note(256, 0.004)
    assert cost.of(1) == 0.0005
    assert cost.of(300) == 0.004
    assert cost.of_many(512 + 1, 256) == pytest.approx(0.0085)


def test_an_unknown_size_is_taken_for_the_nearest_smaller_one() -> None:
    cost = PassCost()
    assert cost.of(64) == 0.0
    cost.note(8, 0.002)
    assert cost.of(64) == 0.002
    assert cost.of(1) == 0.002


def test_the_newest_passes_count_most() -> None:
    cost = PassCost()
    cost.note(4, 0.001)
    for _ in range(20):
        cost.note(4, 0.01)
    assert cost.of(4) == pytest.approx(0.01, rel=0.02)
