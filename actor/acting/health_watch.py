"""How health watches what acts: that environments step and that published weights arrive."""

from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.protocol.limits import MAX_WATCH_WAIT_MS, WATCH_GRACE_S
from penstock.runtime.health import Health

ENVIRONMENT: Final = "environment"
"""Name under which health watches the steps."""
BEING_MADE: Final = "environments and policy are being made"
BROKER: Final = "broker"
"""Name under which health watches that the broker answers."""
WEIGHTS: Final = "weights"
"""Name under which health watches that published weights arrive."""


def watch(health: Health, stall_timeout_s: float) -> None:
    """Have health watch what a generator does, from when it is first expected."""
    for name in (ENVIRONMENT, WEIGHTS):
        health.watch(name, stall_timeout_s)
        health.suspend(name)


def watch_broker(health: Health, stall_timeout_s: float) -> Callable[[], None]:
    """Have health watch that the broker answers; returns what is to be called after each answer.

    A call that waits for news is answered when its wait is over, so that much is added to the limit.
    """
    health.watch(BROKER, stall_timeout_s + MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S)
    health.expect(BROKER, "it answers no call; is it there, and does its Redis answer?")
    return partial(health.progress, BROKER)


def note_lag(health: Health, known: int, newest: int, arrived_bytes: int) -> None:
    """Expect weights while an older version is held here than is published.

    health: of this process. known, newest: the version held and the one published, 0: none. arrived_bytes: of
    the newest; each chunk is progress.
    """
    if newest > known:
        if arrived_bytes > 0:
            health.progress(WEIGHTS)
        health.expect(WEIGHTS, f"version {newest} is published, {known} is held here")
    else:
        health.suspend(WEIGHTS)
