"""Health watches that published weights arrive."""

from actor.acting.health_watch import note_lag, watch
from penstock.runtime.health import Health


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


def test_weights_that_arrive_slowly_are_progress_and_those_that_stand_still_are_not() -> None:
    """Each chunk counts; the same version told again does not."""
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
