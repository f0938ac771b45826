"""The broker process: the gRPC front of one run's Redis.

It keeps nothing that matters: whatever it acknowledged is in Redis, so it may be killed at any moment, and
any number of brokers may serve one run. It waits for Redis up to `broker.redis_wait_s`; while Redis is away
it answers FULL or NOT_READY and `/readyz` is red, and after as long again it exits with 1.

  asked to end ─► not ready ─► `broker.drain_delay_s` ─► NOT_SERVING ─► held calls answered, appends that
                                                                        have begun finished ─► exit with 0
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from redis import asyncio as redis_asyncio
from redis.exceptions import RedisError

from penstock.broker.log import connection
from penstock.broker.log.connection import connect_async, is_unavailable, without_password
from penstock.broker.log.replies import Status
from penstock.broker.log.store import OtherRelease, Store, StoreUnavailable
from penstock.broker.service.control_service import ControlService, Versions
from penstock.broker.service.experience_service import Admission, ExperienceService, StagingLimit
from penstock.broker.service.sessions import Changes, LastCredit, SessionOwners
from penstock.broker.service.weight_service import WeightCache, WeightService
from penstock.config.credentials import redis_password, registry_with_password, tls_files
from penstock.config.settings import BrokerSection, ConfigurationError, SecuritySection, Settings
from penstock.protocol import append
from penstock.protocol.limits import (
    APPEND_DEADLINE_S,
    CALL_DEADLINE_S,
    KIB,
    MAX_MESSAGE_BYTES,
    MAX_WATCH_WAIT_MS,
    WATCH_GRACE_S,
)
from penstock.protocol.messages import Role
from penstock.rpc.gate import Boundary, CallRule
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health, leave_out_what_stays, serve_http
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.metrics import EVENT_LOOP, watch_loop
from penstock.runtime.retry import Interrupted, retry_async
from penstock.runtime.server_frame import ServerFrame, setter
from penstock.v1 import control_pb2_grpc, experience_pb2_grpc, weights_pb2_grpc

# ---- Looks at Redis once a second: readiness, gauges, and the end of a broker whose Redis stays away.

log = logging.getLogger(__name__)
INTERVAL_S: Final = 1.0
LOOKS: Final = "looks at redis"
"""Name under which health watches the looks at Redis."""


class Monitor:
    """Looks at Redis once a second, for readiness and gauges."""

    def __init__(
        self,
        store: Store,
        health: Health,
        section: BrokerSection,
        examine: connection.Examine,
        on_facts: Callable[[connection.ServerFacts], None],
        run: str = "",
    ) -> None:
        """run: name of the run that this broker serves; "": the one that Redis holds."""
        self._run = run
        self._store, self._health, self._section = store, health, section
        self._examine, self._on_facts = examine, on_facts
        self._away_since: float | None = None
        for name in (EVENT_LOOP, LOOKS):
            health.watch(name, section.stall_timeout_s)

    async def run(self) -> None:
        while True:
            await self.look()
            self._health.progress(LOOKS)
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        try:
            facts = await self._examine()
            self._on_facts(facts)
            show_server(facts)
            status = await self._store.status()
        except connection.UnsuitableRedis as error:
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


def show_server(facts: connection.ServerFacts) -> None:
    metrics.REDIS_MEMORY_BYTES.set(facts.used_memory_bytes)
    metrics.REDIS_MEMORY_LIMIT_BYTES.set(facts.max_memory_bytes)
    metrics.REDIS_CLIENTS.set(facts.clients)
    metrics.REDIS_OPERATIONS.set(facts.operations_per_second)
    metrics.REDIS_WRITE_FAILING.set(facts.cannot_persist)
    metrics.REDIS_REWRITE_FAILING.set(facts.cannot_rewrite)


def show(status: Status) -> None:
    metrics.OUTSTANDING_STEPS.set(status.outstanding_steps)
    metrics.SETTLED_STEPS.set(status.settled_steps)
    metrics.LOG_ENTRIES.set(status.log_entries)
    metrics.LOG_BYTES.set(status.log_bytes)
    metrics.BUDGET_STEPS.set(status.budget_steps)
    metrics.LOG_CEILING_BYTES.set(status.max_log_bytes)
    metrics.LOG_CEILING_ENTRIES.set(status.max_log_entries)
    metrics.LOG_CLOSED.set(status.closed)
    for role in Role:
        count = sum(row.role is role for row in status.sessions)
        metrics.SESSIONS_OPEN.labels(role=role.label).set(count)


# ---- Whether calls are in progress: fault tests distinguish busy moments from idle ones by it.

_HELD: Final = frozenset({"WatchLatest"})


class CallsInFlight:
    """The calls of one event loop."""

    def __init__(self) -> None:
        self.calls = 0

    def serving(self, name: str) -> AbstractContextManager[None]:
        return _Serving(self, 0 if name in _HELD else 1)


class _Serving(AbstractContextManager[None]):
    def __init__(self, all_calls: CallsInFlight, weight: int) -> None:
        self._all, self._weight = all_calls, weight

    def __enter__(self) -> None:
        self._all.calls += self._weight

    def __exit__(self, *_error: object) -> None:
        self._all.calls -= self._weight
        if not self._all.calls:
            failpoint("broker.waiting")


# ---- Rules of the broker's calls: how they are bounded, read and answered.

LARGEST_CALL_BYTES: Final = 16 * KIB
"""Largest request of a call without another rule: a parser makes an object of two bytes."""
ORDINARY: Final = CallRule(largest_bytes=LARGEST_CALL_BYTES, deadline_s=CALL_DEADLINE_S)


RULES: Final = {
    "Append": CallRule(largest_bytes=MAX_MESSAGE_BYTES, deadline_s=APPEND_DEADLINE_S, parse=append.parse),
    # 256 KiB hold the largest report.
    "ReportEpisodes": CallRule(largest_bytes=256 * KIB, deadline_s=CALL_DEADLINE_S),
    "WatchLatest": CallRule(
        largest_bytes=LARGEST_CALL_BYTES,
        deadline_s=MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S,
        writes_bytes=True,
    ),
    "GetWeights": CallRule(largest_bytes=LARGEST_CALL_BYTES, deadline_s=CALL_DEADLINE_S, writes_bytes=True),
}


def build_boundary() -> Boundary:
    return Boundary(
        rules=RULES,
        ordinary=ORDINARY,
        process="broker",
        unavailable={StoreUnavailable: "redis"},
        in_flight=CallsInFlight().serving,
        on_malformed=metrics.REFUSALS.labels(reason="malformed").inc,
    )


# ---- The process.

ROLE: Final = "broker"
SERVICES: Final = tuple(
    f"penstock.v1.{name}" for name in ("ExperienceService", "WeightService", "ControlService")
)
DRAIN_GRACE_S: Final = 10.0
_INSIST_S: Final = 0.1


def main(lifecycle: Lifecycle, settings: Settings, *, redis_url: str, listen: str) -> int:
    """Serve until the lifecycle drains; returns the exit code.

    Raises ConfigurationError for an address or a Redis that cannot be used, Fatal when Redis stays away.
    """
    return asyncio.run(_serve(lifecycle, settings, redis_url, listen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one broker is made of."""

    store: Store
    changes: Changes
    experience: ExperienceService
    versions: Versions
    frame: ServerFrame


async def _serve(lifecycle: Lifecycle, settings: Settings, redis_url: str, listen: str) -> int:
    stop = asyncio.Event()
    lifecycle.on_drain(setter(stop))
    health = Health(ROLE)
    frame = build_frame(settings, listen)
    inspector = connect_inspector(redis_url, settings.security)
    try:
        _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
        address = frame.bind()
        examine = partial(connection.examine, inspector, redis_url, settings.broker)
        facts = await wait_for_redis(examine, redis_url, settings.broker.redis_wait_s, stop)
        parts = assemble(frame, settings, redis_url, facts)
        leave_out_what_stays()
        await frame.begin(metrics_port=metrics_port)
        log.info("serving", extra={"address": address, "redis": facts.version})
        monitor = Monitor(
            parts.store, health, settings.broker, examine, parts.experience.note_facts, settings.run
        )
        await _run(parts, monitor, stop, health, settings.broker.drain_delay_s)
        await _drain(parts)
    except Interrupted:
        log.info("ended while waiting for redis")
    finally:
        await frame.close()
        await inspector.aclose()
    return EXIT_OK


def build_frame(settings: Settings, listen: str) -> ServerFrame:
    return ServerFrame(ROLE, SERVICES, settings, listen, boundary=build_boundary())


def connect_inspector(redis_url: str, section: SecuritySection) -> "redis_asyncio.Redis":
    """Raise ConfigurationError for what is no Redis URL."""
    try:
        inspector: redis_asyncio.Redis = connect_async(redis_url, redis_password(section), tls_files(section))
    except ValueError as error:
        text = (
            f"broker.redis={without_password(redis_url)}: write redis://, rediss:// or unix:///path ({error})"
        )
        raise ConfigurationError(text) from error
    return inspector


async def wait_for_redis(
    examine: connection.Examine, redis_url: str, wait_s: float, stop: asyncio.Event
) -> connection.ServerFacts:
    """Raise ConfigurationError for an unsuitable server, Fatal after `wait_s`, Interrupted."""
    shown = without_password(redis_url)

    def say(error: Exception, delay_s: float) -> None:
        fields = {"redis": shown, "error": str(error), "retry_s": delay_s, "limit_s": wait_s}
        log.warning("waiting for redis", extra=fields)

    try:
        facts = await retry_async(examine, retryable=is_unavailable, stop=stop, on_wait=say, give_up_s=wait_s)
    except connection.UnsuitableRedis as error:
        raise ConfigurationError(f"redis at {shown}: {error}") from error
    except RedisError as error:
        if not is_unavailable(error):
            text = f"redis at {shown}: {error}; check the URL's user and security.redis_password"
            raise ConfigurationError(text) from error
        text = (
            f"redis at {shown} did not answer for {wait_s} s (broker.redis_wait_s): {error}; start it or "
            "check the URL"
        )
        raise Fatal(text) from error
    for warning in facts.warnings:
        log.warning("redis: %s", warning)
    return facts


def assemble(frame: ServerFrame, settings: Settings, redis_url: str, facts: connection.ServerFacts) -> Parts:
    section = settings.broker
    store = Store.connect(
        redis_url, password=redis_password(settings.security), tls=tls_files(settings.security)
    )
    changes, last_credit = Changes(), LastCredit()
    owners = SessionOwners(store.owner_of, store.confirm)
    admission = Admission(store.specification, store.confirm)
    experience = ExperienceService(
        store,
        admission,
        StagingLimit(section.max_staged_bytes),
        facts,
        owners,
        last_credit,
        changes,
    )
    weights = WeightService(store, WeightCache(store.weights_chunk), changes, owners, last_credit)
    for remembered in (admission, owners, last_credit, weights):
        store.on_incarnation(remembered.forget)
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(experience, frame.server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(weights, frame.server)
    versions = Versions(registry_with_password(settings.registry), settings.serving.policy)
    control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(store, versions), frame.server)
    return Parts(store=store, changes=changes, experience=experience, versions=versions, frame=frame)


async def _run(
    parts: Parts, monitor: Monitor, stop: asyncio.Event, health: Health, drain_delay_s: float
) -> None:
    """Serve until `stop`, then, not ready, for `drain_delay_s`, in which clients learn of the end."""
    beside = {
        asyncio.create_task(parts.changes.follow(parts.store.changes())),
        asyncio.create_task(watch_loop(partial(health.progress, EVENT_LOOP))),
    }
    try:
        await _until_first(stop.wait(), monitor.run(), beside=beside)
        health.set_ready(False, "draining")
        health.suspend(LOOKS)
        await _until_first(asyncio.sleep(drain_delay_s), beside=beside)
    finally:
        await _cancel(beside)


async def _until_first(*ends: Coroutine[Any, Any, Any], beside: "set[asyncio.Task[None]]") -> None:
    """Until one of `ends` has ended; raises what it, or a task beside it, raised."""
    tasks = {asyncio.create_task(end) for end in ends}
    try:
        done, _ = await asyncio.wait(tasks | beside, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _cancel(tasks)


async def _cancel(tasks: "set[asyncio.Task[None]]") -> None:
    """End the tasks; raises what one of them raised.

    Cancelled again until they end: before Python 3.12 `asyncio.wait_for`, which the Redis client uses,
    swallows a cancellation that comes as it ends.
    """
    pending = tasks
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_INSIST_S)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _drain(parts: Parts) -> None:
    await parts.frame.drain(DRAIN_GRACE_S, release=parts.changes.close)
    await parts.experience.finish_appends()
    parts.versions.close()
    await parts.store.aclose()
