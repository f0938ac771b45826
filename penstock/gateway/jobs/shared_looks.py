"""Looks that many streams share: what one of them has just found out, none asks again.

A thousand pages that follow one job look at its row and its log once in a while, all together; and they rest
for different times between, so that they do not all wake at once.
"""

import asyncio
import random
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")
MOST_KEPT: Final = 256
"""Looks that are remembered before those that are old are let go of."""


class SharedLooks:
    """For one event loop. fresh_s: how long what was found stands for what is."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._known: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def at(self, key: Hashable, look: Callable[[], T]) -> T:
        """Return what `look`, which blocks, finds for a key, or has found just now; raises what it raises."""
        now = asyncio.get_running_loop().time()
        known = self._known.get(key)
        if known is None or self._is_old(known, now):
            if len(self._known) >= MOST_KEPT:
                self._known = {one: it for one, it in self._known.items() if not self._is_old(it, now)}
            known = now, asyncio.ensure_future(run_in_threadpool(look))
            known[1].add_done_callback(_retrieve)
            self._known[key] = known
        # One that leaves does not end the look for the others.
        found: T = await asyncio.shield(known[1])
        return found

    def _is_old(self, known: tuple[float, asyncio.Task[Any]], now: float) -> bool:
        return known[1].done() and known[0] + self._fresh_s <= now


async def rest(look_s: float) -> None:
    """Wait until a stream looks again, about `look_s` seconds: from half of them to one and a half.

    Who waited for one look together would wake together ever after, a thousand at once.
    """
    await asyncio.sleep(look_s * random.uniform(0.5, 1.5))


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a look that no caller waits for any longer, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
