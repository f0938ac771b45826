"""A second version that is asked how likely it finds what a first one has answered; no client hears of it.

    answer ─► waits (at most MAX_TOKENS) ─► no answer grows or waits ─► one plain pass ─► metric, record
                   └── full: left out, counted

All versions share one network, so that the shadow has it only while no client does. The record holds versions
and log-probabilities of tokens, and neither texts nor ids.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.registry.routing import Arm
from penstock.runtime import metrics
from workloads.language.engine.engine_choice import TextEngine
from workloads.plugin.serving import ShadowRecord

MAX_TOKENS: Final = 2**18
"""Tokens of answers and their prompts that wait for the shadow."""
AT_ONCE: Final = 8
"""Answers that it is asked about before clients are looked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An answer, and what is asked of it.

    shadow: version that is asked. conversation, request_id: whose answer it is. version, arm: of the answer.
    ids: all tokens, the prompt's first. log_prob: of the answer's, which are the last.
    """

    shadow: int
    conversation: str
    request_id: str
    version: int
    arm: Arm
    ids: tuple[int, ...]
    log_prob: tuple[float, ...]


class TextShadow:
    """Used by one event loop. engine: whose versions answer. record: where its answers are kept."""

    def __init__(self, engine: TextEngine, record: ShadowRecord | None) -> None:
        self._engine, self._record = engine, record
        self._waiting: deque[Compared] = deque()
        self._tokens = 0
        self._running: asyncio.Future[None] | None = None

    def compare(self, compared: Compared) -> None:
        """Ask the shadow of an answer, later; left out while too many wait."""
        if self._tokens + len(compared.ids) > MAX_TOKENS:
            metrics.SHADOW_SHED.inc()
            return
        self._tokens += len(compared.ids)
        self._waiting.append(compared)

    def sweep(self) -> None:
        """Ask of some that wait, where no client is; called all the time."""
        if not self._waiting or self._running is not None or self._engine.waiting or self._engine.under_way:
            return
        self._begin()

    async def finish(self) -> None:
        """Ask of all that wait."""
        while self._waiting or self._running is not None:
            if self._running is None:
                self._begin()
            else:
                await self._running

    def close(self) -> None:
        """Let go of the record."""
        if self._record is not None:
            self._record.close()

    def _begin(self) -> None:
        group = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        self._tokens -= sum(len(one.ids) for one in group)
        self._running = asyncio.ensure_future(self._compare(group))

    async def _compare(self, group: Sequence[Compared]) -> None:
        try:
            for one, said in zip(group, await asyncio.to_thread(self._ask, group), strict=True):
                self._note(one, said)
        finally:
            self._running = None

    def _ask(self, group: Sequence[Compared]) -> list[tuple[float, ...] | Exception]:
        """In a thread: the log-probabilities of each answer's tokens, or why there are none."""
        began, found = time.thread_time(), list[tuple[float, ...] | Exception]()
        for one in group:
            try:
                start = len(one.ids) - len(one.log_prob)
                found.append(tuple(self._engine.log_prob(one.shadow, one.ids, start)))
            except Exception as error:  # noqa: BLE001 - noted with each; clients have their answers
                found.append(error)
        metrics.SHADOW_SECONDS.inc(time.thread_time() - began)
        return found

    def _note(self, one: Compared, said: tuple[float, ...] | Exception) -> None:
        agreement = 0.0 if isinstance(said, Exception) else float(np.exp(np.minimum(said, 0.0)).mean())
        metrics.SHADOW_AGREEMENT.observe(agreement)
        if self._record is not None:
            self._record.put(_Line(time.time(), one, said), len(one.log_prob))


@dataclass(frozen=True, slots=True)
class _Line:
    """time: Unix, in seconds."""

    time: float
    compared: Compared
    said: tuple[float, ...] | Exception

    def told(self) -> Mapping[str, Any]:
        """See `ToldLater`."""
        one, said = self.compared, self.said
        other: dict[str, Any] = {"error": str(said)} if isinstance(said, Exception) else {"log_prob": said}
        return {
            "time": self.time,
            "conversation": one.conversation,
            "request_id": one.request_id,
            "answered": {"version": one.version, "arm": str(one.arm), "log_prob": one.log_prob},
            "shadow": {"version": one.shadow, **other},
        }
