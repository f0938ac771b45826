import re

from benchmarks import shapes


def test_a_target_that_any_policy_reaches_is_reached_at_the_first_look() -> None:
    """Evaluated every second update; the training episodes say so once there are enough of them."""
    settings = shapes.settings_of("CartPole-v1", 16, 64, seed=1)
    found = shapes.measure(settings, target=9.0, limit=20_000)
    assert found.evaluated is not None
    assert found.shown is not None
    assert 0 < found.shown <= found.evaluated <= 2 * 1024
    assert found.acting_us > 0


def test_a_target_that_none_reaches_ends_at_the_limit() -> None:
    """And is said not to have been reached, by either."""
    settings = shapes.settings_of("CartPole-v1", 16, 64, seed=1)
    found = shapes.measure(settings, target=501.0, limit=3_000)
    assert (found.evaluated, found.shown) == (None, None)


def test_shapes_are_compared_with_the_first_of_them_seed_by_seed() -> None:
    """The same seed learns the same with the same shape, so that a shape differs from itself by nothing."""
    table = shapes.table("CartPole-v1", ["16x64", "8x128"], [1, 2], target=30.0, limit=40_000)
    again = shapes.table("CartPole-v1", ["16x64"], [1, 2], target=30.0, limit=40_000)
    (first, other), (repeated,) = table.rows, again.rows
    assert first[:5] == repeated[:5]
    assert (first[2], first[4]) == (None, None)
    assert other[0] == "8x128"
    assert re.fullmatch(r"[+-][\d,]+ ± [\d,]+", str(other[2]))
    assert isinstance(first[1], float)
    assert isinstance(other[1], float)
    assert abs(other[1] - first[1] - float(str(other[2]).partition(" ")[0].replace(",", ""))) <= 0.5


def test_a_seed_that_did_not_reach_the_target_leaves_no_mean() -> None:
    """A mean of those that did would praise a shape for the seeds that it fails."""
    table = shapes.table("CartPole-v1", ["16x64"], [1], target=501.0, limit=2_000)
    assert table.rows[0][1:5] == [None, None, None, None]
