"""Offers that replace one another before they are published."""

import numpy as np

from penstock.learner.publish.publisher import PendingPublication, _merged

WEIGHTS = {"w": np.zeros(1, np.float32)}


def offered(update: int, *, evaluate: bool = False) -> PendingPublication:
    """Weights after an update."""
    return PendingPublication(settled=update * 10, weights=WEIGHTS, update=update, evaluate=evaluate)


def test_newer_weights_hold_the_updates_that_were_skipped() -> None:
    merged = _merged(_merged(offered(1, evaluate=True), offered(2)), offered(3))
    assert (merged.update, merged.settled, merged.evaluate) == (3, 30, True)


def test_settling_further_does_not_replace_weights() -> None:
    merged = _merged(offered(1), PendingPublication(settled=25))
    assert (merged.update, merged.settled) == (1, 25)
