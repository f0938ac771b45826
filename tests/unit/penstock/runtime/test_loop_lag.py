"""A loop that does not come round is seen from outside, and its lag is measured."""

import asyncio
import threading
from functools import partial

import pytest

from penstock.runtime import metrics
from penstock.runtime.health import Health
from penstock.runtime.metrics import PERIOD_S, watch_loop

PATIENCE_S = 60.0
LOOP = "event loop"


def until_health(health: Health, is_red: bool) -> str | None:
    """Wait until the health is so; why it is red."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if (health.problem() is not None) is is_red:
            return health.problem()
        pause.wait(0.01)
    raise AssertionError(f"health stays {health.problem()!r}")


@pytest.mark.promise("healthz-role-turns-red")
def test_a_blocked_loop_turns_health_red_and_shows_as_lag() -> None:
    health, blocked, go_on, end = Health("broker"), threading.Event(), threading.Event(), threading.Event()
    health.watch(LOOP, 1.0)

    async def main() -> None:
        task = asyncio.create_task(watch_loop(partial(health.progress, LOOP)))
        await asyncio.sleep(2 * PERIOD_S)
        blocked.set()
        go_on.wait(PATIENCE_S)  # blocks the loop
        await asyncio.to_thread(end.wait, PATIENCE_S)
        task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    blocked.wait(PATIENCE_S)
    reason = until_health(health, is_red=True)
    assert reason is not None
    assert reason.startswith("event loop: no progress for ")
    go_on.set()
    until_health(health, is_red=False)
    end.set()
    thread.join(PATIENCE_S)
    text = metrics.exposition("broker").decode()
    worst = next(line for line in text.splitlines() if line.startswith("penstock_loop_lag_worst_seconds "))
    assert float(worst.split()[1]) > 1.0 - PERIOD_S
