"""Looks at Redis once a second: readiness, gauges, and the end of a broker whose Redis stays away.

Every look examines the server again: it may have been restarted or set to forget meanwhile; `on_facts` is
told what it gives now. Raises Fatal when it has become unsuitable, or is away or refuses writes (its disk is
full) for too long.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from redis.exceptions import RedisError

from penstock.broker.log import guard
from penstock.broker.log.store import OtherRelease, Store, StoreUnavailable
from penstock.broker.log.store_records import Status
from penstock.config.settings import BrokerSection
from penstock.protocol.messages import Role
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health
from penstock.runtime.loop_lag import EVENT_LOOP

log = logging.getLogger(__name__)
INTERVAL_S: Final = 1.0
LOOKS: Final = "looks at redis"
"""What health watches beside the event loop."""


class Monitor:
    """Looks at Redis once a second, for readiness and gauges."""

    def __init__(
        self,
        store: Store,
        health: Health,
        section: BrokerSection,
        examine: guard.Examine,
        on_facts: Callable[[guard.ServerFacts], None],
        run: str = "",
    ) -> None:
        """`run`: whose callers this broker serves; "" for whichever Redis holds."""
        self._run = run
        self._store, self._health, self._section = store, health, section
        self._examine, self._on_facts = examine, on_facts
        self._away_since: float | None = None
        for name in (EVENT_LOOP, LOOKS):
            health.watch(name, section.stall_timeout_s)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await self.look()
            self._health.progress(LOOKS)
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """One look; raises Fatal."""
        try:
            facts = await self._examine()
            self._on_facts(facts)
            show_server(facts)
            status = await self._store.status()
        except guard.UnsuitableRedis as error:
            raise Fatal(f"redis has become unsuitable: {error}") from error
        except OtherRelease as error:
            raise Fatal(str(error)) from error
        except (StoreUnavailable, RedisError) as error:
            self._note_away(error)
        else:
            if facts.cannot_persist:
                self._note_away("it cannot write its append-only file (MISCONF), make room on its disk")
            else:
                self._note_there(status)

    def _note_away(self, error: Exception | str) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.warning("redis does not serve", extra={"error": str(error)})
        metrics.REDIS_UP.set(0)
        self._health.set_ready(False, f"redis does not serve: {error}")
        if now - self._away_since > self._section.redis_wait_s:
            limit = self._section.redis_wait_s
            raise Fatal(f"redis did not serve for {limit} s (broker.redis_wait_s): {error}; start it again")

    def _note_there(self, status: Status) -> None:
        if self._run and status.run and status.run != self._run:
            raise Fatal(
                f"redis holds run {status.run!r} and this broker serves the callers of {self._run!r} (run): "
                "give each run a Redis of its own"
            )
        if self._away_since is not None:
            log.info("redis serves again", extra={"away_s": time.monotonic() - self._away_since})
        self._away_since = None
        metrics.REDIS_UP.set(1)
        self._health.set_ready(True)
        show(status)


def show_server(facts: guard.ServerFacts) -> None:
    """Set the gauges of Redis itself."""
    metrics.REDIS_MEMORY_BYTES.set(facts.used_memory_bytes)
    metrics.REDIS_MEMORY_LIMIT_BYTES.set(facts.max_memory_bytes)
    metrics.REDIS_CLIENTS.set(facts.clients)
    metrics.REDIS_OPERATIONS.set(facts.operations_per_second)
    metrics.REDIS_WRITE_FAILING.set(facts.cannot_persist)
    metrics.REDIS_REWRITE_FAILING.set(facts.cannot_rewrite)


def show(status: Status) -> None:
    """Set the gauges of the run."""
    metrics.OUTSTANDING_STEPS.set(status.gauges.outstanding_steps)
    metrics.SETTLED_STEPS.set(status.gauges.settled_steps)
    metrics.LOG_ENTRIES.set(status.gauges.log_entries)
    metrics.LOG_BYTES.set(status.gauges.log_bytes)
    metrics.BUDGET_STEPS.set(status.budget_steps)
    metrics.LOG_CEILING_BYTES.set(status.max_log_bytes)
    metrics.LOG_CEILING_ENTRIES.set(status.max_log_entries)
    metrics.LOG_CLOSED.set(status.closed)
    for role in Role:
        count = sum(row.role is role for row in status.sessions)
        metrics.SESSIONS_OPEN.labels(role=role.label).set(count)
