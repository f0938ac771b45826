"""Measures the lag of this process's event loop: everything else in the loop is late by as much.

A sleeper notes by how much it oversleeps: a handler that computes for 50 ms between two awaits shows as
50 ms here, and as 50 ms in every acknowledgement meanwhile. Each time it wakes is progress of the loop.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.runtime import metrics

EVENT_LOOP: Final = "event loop"
"""Its name among what health watches."""
PERIOD_S: Final = 0.05
WINDOW_S: Final = 10.0
"""Seconds of a window; the gauge shows the worst lag of this window or the one before."""


async def watch_loop(on_round: Callable[[], None]) -> None:
    """Measure the lag until cancelled; calls `on_round` after every round."""
    loop = asyncio.get_running_loop()
    worst = before = 0.0
    turn_s = loop.time() + WINDOW_S
    while True:
        due_s = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        now_s = loop.time()
        late_s = max(0.0, now_s - due_s)
        if now_s >= turn_s:
            worst, before, turn_s = 0.0, worst, now_s + WINDOW_S
        worst = max(worst, late_s)
        metrics.LOOP_LAG_SECONDS.observe(late_s)
        metrics.LOOP_LAG_WORST_SECONDS.set(max(worst, before))
        on_round()
