"""Offers that replace one another before they are published."""

import numpy as np

from learner.publish.publisher import PendingPublication, _merged

WEIGHTS = {"w": np.zeros(1, np.float32)}


def offered(update: int, *, trace: str = "", evaluate: bool = False) -> PendingPublication:
    """Weights after an update."""
    traces = (trace,) if trace else ()
    return PendingPublication(
        settled=update * 10, weights=WEIGHTS, update=update, evaluate=evaluate, traces=traces
    )


def test_newer_weights_hold_the_updates_that_were_skipped() -> None:
    """Their traces lead to this publication, and what was to be evaluated still is."""
    merged = _merged(_merged(offered(1, trace="a", evaluate=True), offered(2)), offered(3, trace="b"))
    assert (merged.update, merged.settled, merged.evaluate) == (3, 30, True)
    assert merged.traces == ("a", "b")


def test_settling_further_does_not_replace_weights() -> None:
    """They wait with their trace."""
    merged = _merged(offered(1, trace="a"), PendingPublication(settled=25))
    assert (merged.update, merged.settled, merged.traces) == (1, 25, ("a",))


def test_a_publisher_that_is_held_up_for_long_keeps_the_newest_traces() -> None:
    """Not one more for each update."""
    merged = offered(0, trace="0")
    for update in range(1, 1000):
        merged = _merged(merged, offered(update, trace=str(update)))
    assert merged.traces == tuple(str(update) for update in range(936, 1000))
