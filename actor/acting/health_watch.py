"""How health watches what acts: that environments step and that published weights arrive."""

from typing import Final

from penstock.runtime.health import Health

ENVIRONMENT: Final = "environment"
"""Name under which health watches the steps."""
WEIGHTS: Final = "weights"
"""Name under which health watches that published weights arrive."""


def watch(health: Health, stall_timeout_s: float) -> None:
    """Have health watch what a generator does, from when it is first expected."""
    for name in (ENVIRONMENT, WEIGHTS):
        health.watch(name, stall_timeout_s)
        health.suspend(name)


def note_lag(health: Health, known: int, newest: int, arrived_bytes: int) -> None:
    """Expect weights while an older version is held here than is published; each chunk is progress."""
    if newest > known:
        if arrived_bytes > 0:
            health.progress(WEIGHTS)
        health.expect(WEIGHTS, f"version {newest} is published, {known} is held here")
    else:
        health.suspend(WEIGHTS)
