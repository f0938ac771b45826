"""Health watches that published weights arrive and that the broker answers."""

import pytest

from penstock.actor.process import watch_broker
from penstock.actor.rollout.loop import note_lag, watch
from penstock.protocol.limits import MAX_WATCH_WAIT_MS, WATCH_GRACE_S
from penstock.runtime.health import Health


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


def test_weights_that_arrive_slowly_are_progress_and_those_that_stand_still_are_not() -> None:
    clock = Clock()
    health = Health("actor", clock)
    watch(health, stall_timeout_s=100.0)
    for arrived in range(5):
        note_lag(health, 1, 2, arrived)
        clock.now_s += 60.0
    assert health.problem() is None
    note_lag(health, 1, 2, 0)
    clock.now_s += 60.0
    assert health.problem() is not None
    note_lag(health, 2, 2, 0)
    assert health.problem() is None


@pytest.mark.promise("healthz-role-turns-red")
def test_a_broker_that_answers_nothing_is_told_from_one_that_holds_a_call() -> None:
    clock = Clock()
    health = Health("actor", clock)
    answered = watch_broker(health, stall_timeout_s=10.0)
    clock.now_s += MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S + 5.0
    assert health.problem() is None
    answered()
    clock.now_s += MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S + 15.0
    problem = health.problem()
    assert problem is not None
    assert problem.startswith("broker: no progress for ")
    answered()
    assert health.problem() is None
