import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.broker.log import connection
from penstock.broker.log.connection import connect_async
from penstock.broker.log.replies import Change, Scope
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.experience_service import (
    CALLS_PER_S,
    LEAST_S,
    MOST_S,
    REFRESH_INTERVAL_S,
    REFUSED_INTERVAL_S,
    Admission,
    RetryTimes,
    StagingLimit,
    check_all,
)
from penstock.broker.service.process import (
    LARGEST_CALL_BYTES,
    ORDINARY,
    RULES,
    Monitor,
    _cancel,
    _run,
    _until_first,
    assemble,
    build_boundary,
    build_frame,
    connect_inspector,
)
from penstock.broker.service.sessions import Changes, Held, check_number
from penstock.broker.service.weight_service import MAX_CACHED_BYTES, CorruptWeights, WeightCache
from penstock.config.settings import BrokerSection, load
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    MAX_EPISODES_PER_REPORT,
    MAX_MESSAGE_BYTES,
    MAX_NUMBER,
    WEIGHT_CHUNK_BYTES,
)
from penstock.protocol.messages import Publication
from penstock.protocol.refusal import Reason, Refused
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_async_channel
from penstock.rpc.gate import Absent, Gate, Malformed, RateLimits, Rates, read_request
from penstock.runtime import metrics
from penstock.runtime.health import Health
from penstock.runtime.metrics import EVENT_LOOP
from penstock.runtime.server_frame import Front, bind
from penstock.v1 import control_pb2, control_pb2_grpc
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import sent
from tests.support.run.harness import eventually
from tests.support.run.small_run import SLOTS, STEPS, fragment, specification
from tests.support.run.store_run import PACING, open_run

SESSION = 7


def _with(**changes: object) -> Fragment:
    good = fragment(SESSION)
    return replace(good, header=replace(good.header, **changes))  # type: ignore[arg-type]


NAN = np.full((STEPS, SLOTS), np.nan, np.float32)
BAD = {
    "reward: holds NaN": fragment(SESSION, reward=NAN),
    "header.session=8": _with(session=8),
    "header.steps=5": _with(steps=5),
    "header.sequence=9007199254740993": _with(sequence=2**53 + 1),
    "payload": replace(fragment(SESSION), payload=fragment(SESSION).payload[:-1]),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_fragment_is_invalid_and_the_reason_names_the_field(field: str) -> None:
    messages = [sent(each) for each in (fragment(SESSION, 1), BAD[field], fragment(SESSION, 3))]
    admitted = check_all(SESSION, messages, specification())
    assert [item.header.sequence for item in admitted.items] == [1]
    assert admitted.refusal is not None
    assert admitted.refusal.reason is Reason.INVALID
    assert admitted.refusal.detail.startswith("fragments[1]")
    assert field in admitted.refusal.detail


def test_a_good_fragment_is_forwarded_unchanged() -> None:
    newer = sent(fragment(SESSION))
    newer.header.MergeFromString(b"\x9a\x06\x03new")
    (item,) = check_all(SESSION, [newer], specification()).items
    assert item.payload == fragment(SESSION).payload
    assert item.header_bytes == newer.header.SerializeToString()
    assert b"new" in item.header_bytes


class StoredSpecification:
    def __init__(self, encoded: bytes | None) -> None:
        self.encoded = encoded
        self.reads = 0

    async def read(self) -> bytes | None:
        self.reads += 1
        return self.encoded


async def confirmed() -> None:
    """The run is the incarnation that was read."""


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_the_specification_is_read_once_it_is_there() -> None:
    stored, clock = StoredSpecification(None), Clock()
    admission = Admission(stored.read, confirmed, clock)
    admitted = await admission.admit(SESSION, [sent(fragment(SESSION))])
    assert admitted.refusal is not None
    assert admitted.refusal.reason is Reason.NOT_READY
    assert admitted.refusal.retry_after_ms > 0
    stored.encoded, stored.reads = specification().encode(), 0
    clock.now_s += REFRESH_INTERVAL_S
    for _ in range(3):
        assert not (await admission.admit(SESSION, [sent(fragment(SESSION))])).refusal
        foreign = await admission.admit(SESSION, [sent(fragment(SESSION, run="run-b"))])
        assert foreign.refusal is not None
        assert foreign.refusal.reason is Reason.INVALID
    assert stored.reads == 1
    messages = [sent(fragment(SESSION, sequence)) for sequence in range(1, 40)]
    large = await admission.admit(SESSION, [*messages, sent(fragment(SESSION, reward=NAN))])
    assert len(large.items) == 39
    assert large.refusal is not None
    assert "fragments[39]" in large.refusal.detail


@pytest.mark.promise("reward-log-probability-beyond")
async def test_limits_lowered_by_a_resumed_learner_apply_from_the_next_second() -> None:
    stored, clock = StoredSpecification(specification().encode()), Clock()
    admission = Admission(stored.read, confirmed, clock)
    rewards = fragment(SESSION, reward=np.full((STEPS, SLOTS), 50.0, np.float32))
    assert not (await admission.admit(SESSION, [sent(rewards)])).refusal
    stored.encoded = replace(specification(), max_reward=10.0).encode()
    clock.now_s += REFRESH_INTERVAL_S
    admitted = await admission.admit(SESSION, [sent(rewards)])
    assert admitted.refusal is not None
    assert "broker.max_reward=10" in admitted.refusal.detail


@pytest.mark.promise("reward-log-probability-beyond")
async def test_limits_raised_by_a_resumed_learner_refuse_nothing() -> None:
    stored, clock = StoredSpecification(replace(specification(), max_reward=10.0).encode()), Clock()
    admission = Admission(stored.read, confirmed, clock)
    assert not (await admission.admit(SESSION, [sent(fragment(SESSION))])).refusal
    stored.encoded = specification().encode()
    clock.now_s += 2 * REFUSED_INTERVAL_S
    rewards = fragment(SESSION, reward=np.full((STEPS, SLOTS), 50.0, np.float32))
    assert not (await admission.admit(SESSION, [sent(rewards)])).refusal


FAULTS = {
    "malformed": (Malformed("reason='malformed': give another"), grpc.StatusCode.INVALID_ARGUMENT),
    "absent": (Absent("version=3: gone"), grpc.StatusCode.NOT_FOUND),
    "redis": (StoreUnavailable("connection refused by 10.0.0.1"), grpc.StatusCode.UNAVAILABLE),
    "bug": (KeyError("a secret of this process"), grpc.StatusCode.INTERNAL),
}
STATUS = "/penstock.v1.ControlService/Status"
PAUSE = "/penstock.v1.ControlService/Pause"


class Faulty(control_pb2_grpc.ControlServiceServicer):
    async def Pause(self, request: control_pb2.ControlRequest, context: Any) -> control_pb2.ControlReply:  # noqa: N802
        if request.reason in FAULTS:
            raise FAULTS[request.reason][0]
        return control_pb2.ControlReply(revision=len(request.reason))


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    gate = Gate(build_boundary(), RateLimits(Rates(calls=1e9, bytes=1e12)))
    front = Front(["penstock.v1.ControlService"], BrokerSection(), interceptors=[gate])
    control_pb2_grpc.add_ControlServiceServicer_to_server(
        Faulty(),  # type: ignore[abstract]  # the other methods stay as they are generated
        front.server,
    )
    address = bind(front.server, "127.0.0.1:0", Credentials())
    await front.server.start()
    # Without the client's own limit, so that what is too large leaves the client.
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened
    await front.server.stop(0)


async def _error(channel: grpc.aio.Channel, request: bytes, method: str = PAUSE) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(method, None, None)(request, timeout=5)
    return caught.value


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_a_handler_raises_has_a_code_and_no_text_of_an_unforeseen_error(
    channel: grpc.aio.Channel, fault: str
) -> None:
    error = await _error(channel, control_pb2.ControlRequest(reason=fault).SerializeToString())
    assert error.code() is FAULTS[fault][1]
    details = str(error.details())
    assert "secret" not in details
    assert "10.0.0.1" not in details
    assert fault != "malformed" or details == "reason='malformed': give another"


TOO_LARGE = control_pb2.ControlRequest(reason="x" * LARGEST_CALL_BYTES).SerializeToString()


@pytest.mark.parametrize(
    ("request_bytes", "said"),
    [
        (b"\xff", "Pause"),
        (b"\x0a\xff\xff\xff\xff\x0f", "Pause"),
        (b"\x0a\x05ab", "Pause"),
        (b"\x08" + b"\xff" * 11, "Pause"),
        (TOO_LARGE, f"{len(TOO_LARGE)} bytes, at most {LARGEST_CALL_BYTES}"),
    ],
    ids=["field", "length", "cut", "number", "large"],
)
async def test_bytes_that_are_no_message_or_too_many_are_an_invalid_argument(
    channel: grpc.aio.Channel, request_bytes: bytes, said: str
) -> None:
    error = await _error(channel, request_bytes)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in str(error.details())


async def test_a_good_call_passes_and_none_that_is_far_too_large_or_does_not_exist(
    channel: grpc.aio.Channel,
) -> None:
    request = control_pb2.ControlRequest(reason="four").SerializeToString()
    reply = await channel.unary_unary(PAUSE, None, None)(request, timeout=5)
    assert control_pb2.ControlReply.FromString(bytes(reply)).revision == 4
    error = await _error(channel, b"\0" * (2 * MAX_MESSAGE_BYTES + 1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for method in (STATUS, "/penstock.v1.ControlService/Nothing", "/other.Service/Call"):
        error = await _error(channel, b"", method)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    async with open_async_channel("127.0.0.1:9", Credentials()) as ours, asyncio.timeout(5):
        with pytest.raises(grpc.aio.AioRpcError):
            await ours.unary_unary(PAUSE, None, None)(b"\0" * (MAX_MESSAGE_BYTES + 1), timeout=2)


def test_the_largest_report_passes() -> None:
    episode = experience.Episode(
        slot_id=4095, episode_id=2**64 - 1, episode_return=-1e300, length=2**64 - 1, version=2**64 - 1
    )
    report = experience.ReportEpisodesRequest(
        session=MAX_NUMBER, sequence=MAX_NUMBER, episodes=[episode] * MAX_EPISODES_PER_REPORT
    )
    rule, data = RULES["ReportEpisodes"], report.SerializeToString()
    read = read_request("ReportEpisodes", report.FromString, data, rule.largest_bytes)
    assert len(read.episodes) == MAX_EPISODES_PER_REPORT


@pytest.mark.parametrize("name", ["Append", "ReportEpisodes", "WatchLatest", "Pause", "Check"])
def test_every_rpc_has_a_largest_request_and_largest_numbers(name: str) -> None:
    largest = RULES.get(name, ORDINARY).largest_bytes
    assert largest is not None
    assert len(read_request(name, None, bytes(largest), largest)) == largest
    with pytest.raises(Malformed, match=f"{largest + 1} bytes, at most {largest}"):
        read_request(name, None, bytes(largest + 1), largest)
    for value in (0, 2**53 + 1, 2**64 - 1):
        with pytest.raises(Malformed, match=f"session={value}"):
            check_number("session", value)


Feed = asyncio.Queue[Change | None]


async def _source(feed: Feed) -> AsyncIterator[Change | None]:
    while True:
        yield await feed.get()


@pytest.fixture
async def feed() -> Feed:
    return Feed()


@pytest.fixture
async def changes(feed: Feed) -> AsyncIterator[Changes]:
    made = Changes()
    following = asyncio.create_task(made.follow(_source(feed)))
    yield made
    following.cancel()


async def _is_woken(held: Held) -> bool:
    """Whether a wait ends though its time is long."""
    for _ in range(50):
        await asyncio.sleep(0)
    waiting = asyncio.create_task(held.wait(60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    woken = waiting.done()
    waiting.cancel()
    return woken


@pytest.mark.parametrize(
    ("change", "woken"),
    [(Change(), [True, True]), (Change((2, 77), Scope.NAMED), [False, True]), (None, [True, True])],
    ids=["everything", "a name", "a heartbeat"],
)
async def test_a_change_wakes_whom_it_concerns(
    changes: Changes, feed: Feed, change: Change | None, woken: list[bool]
) -> None:
    with changes.holding(1) as other, changes.holding(2) as named, changes.holding(3) as fresh:
        named.waits = True
        fresh.begin_look()
        feed.put_nowait(change)
        assert [await _is_woken(held) for held in (other, named)] == woken
        assert change is not None or not await _is_woken(fresh)


async def test_a_wait_ends_with_its_time_and_when_the_broker_closes(changes: Changes) -> None:
    with changes.holding(1) as held:
        await held.wait(0.01)
        await held.wait(0)
        held.waits = True
        changes.close()
        assert await _is_woken(held)
        assert changes.closed


@pytest.mark.promise("publication-wakes-credit-wait")
async def test_a_session_that_waits_for_credit_is_woken_by_name_only(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as working, changes.holding(2) as next_one, changes.holding(3) as waiting:
        changes.note_waiting(2, True)
        changes.note_waiting(3, True)
        feed.put_nowait(Change((2,), Scope.READY))
        assert [await _is_woken(held) for held in (working, next_one, waiting)] == [True, True, False]


async def test_a_change_between_look_and_wait_is_not_lost(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as held:
        held.begin_look()
        feed.put_nowait(Change((1,), Scope.NAMED))
        assert await _is_woken(held)
        held.begin_look()
        assert not await _is_woken(held)


async def test_only_the_newest_call_of_a_session_keeps_watching(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as older, changes.holding(1) as newer:
        assert (older.is_newest, newer.is_newest) == (False, True)
        assert await _is_woken(older)
        assert not await _is_woken(newer)


async def test_a_burst_of_changes_causes_two_wakes(changes: Changes, feed: Feed) -> None:
    woken = 0
    with changes.holding(1) as held:
        for _ in range(200):
            feed.put_nowait(Change())
        async with asyncio.timeout(5):
            for _ in range(2):
                held.begin_look()
                await held.wait(60)
                woken += 1
        held.begin_look()
        assert feed.empty()
        assert not await _is_woken(held)
    assert woken == 2


def told(name: str) -> float:
    found = re.search(rf"^penstock_{name} (\S+)$", metrics.exposition("broker").decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


class Look:
    """A monitor of a real Redis; `changed` are facts that the test makes up."""

    def __init__(self, url: str) -> None:
        self.changed: dict[str, Any] = {}
        self.redis, self.store, self._url = connect_async(url, None), Store.connect(url), url
        section = BrokerSection()
        self.monitor = Monitor(self.store, Health("broker"), section, self._examine, lambda _facts: None)

    async def _examine(self) -> connection.ServerFacts:
        facts = await connection.examine(self.redis, self._url, BrokerSection())
        return replace(facts, **self.changed)


@pytest.fixture
async def look(redis_url: str) -> AsyncIterator[Look]:
    made = Look(redis_url)
    yield made
    await made.redis.aclose()
    await made.store.aclose()


async def test_metrics_show_the_memory_and_clients_of_redis(look: Look) -> None:
    await look.monitor.look()
    info = await look.redis.info()
    assert told("redis_memory_bytes") == pytest.approx(info["used_memory"], rel=0.5)
    assert told("redis_memory_limit_bytes") == info["maxmemory"]
    assert told("redis_clients") >= 1
    assert told("redis_up") == 1


async def test_the_ceilings_are_those_that_the_learner_has_set(look: Look, redis_url: str) -> None:
    await look.monitor.look()
    assert told("log_ceiling_bytes") == 0
    open_run(redis_url)
    await look.monitor.look()
    assert told("log_ceiling_bytes") == PACING.max_log_bytes
    assert told("log_ceiling_entries") == PACING.max_log_entries


@pytest.mark.parametrize(
    ("fact", "name", "up"),
    [("cannot_persist", "redis_write_failing", 0), ("cannot_rewrite", "redis_rewrite_failing", 1)],
)
async def test_an_unwritable_file_is_reported_until_it_is_writable(
    look: Look, fact: str, name: str, up: int
) -> None:
    look.changed = {fact: True}
    await look.monitor.look()
    assert (told(name), told("redis_up")) == (1, up)
    look.changed = {}
    await look.monitor.look()
    assert (told(name), told("redis_up")) == (0, 1)


@pytest.mark.parametrize(
    ("field", "fact"),
    [("aof_last_write_status", "cannot_persist"), ("aof_last_bgrewrite_status", "cannot_rewrite")],
)
async def test_the_guard_reads_the_state_of_the_append_only_file(look: Look, field: str, fact: str) -> None:
    info = await look.redis.info()

    class Failing:
        """The same server, whose disk is full."""

        config_get = staticmethod(look.redis.config_get)
        execute_command = staticmethod(look.redis.execute_command)
        acl_getuser = staticmethod(look.redis.acl_getuser)

        @staticmethod
        async def info() -> dict[str, object]:
            return {**info, field: "err"}

    facts = await connection.examine(Failing(), "unix:///redis", BrokerSection())  # type: ignore[arg-type]
    assert getattr(facts, fact)


async def swallow(times: int) -> None:
    """Go on for ever, and do not hear so many cancellations."""
    heard = 0
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            heard += 1
            if heard > times:
                raise


async def test_a_cancellation_that_is_swallowed_is_repeated() -> None:
    tasks = {asyncio.create_task(swallow(times)) for times in (0, 1, 3)}
    await asyncio.sleep(0)
    ending = asyncio.create_task(_cancel(tasks))
    await asyncio.wait({ending}, timeout=20)
    ended = ending.done() and all(task.cancelled() for task in tasks)
    while left := [task for task in (ending, *tasks) if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
    assert ended


async def test_an_error_of_a_background_task_is_raised() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    beside = {asyncio.create_task(fail())}
    with pytest.raises(LookupError, match="gone"):
        await _until_first(asyncio.sleep(3600), beside=beside)


async def test_a_broker_that_drains_past_the_stall_limit_stays_live(redis_url: str) -> None:
    settings, clock, stop = load([{}]), Clock(), asyncio.Event()
    health = Health("broker", clock)
    inspector = connect_inspector(redis_url, settings.security)
    examine = partial(connection.examine, inspector, redis_url, settings.broker)
    frame = build_frame(settings, "127.0.0.1:0")
    parts = assemble(frame, settings, redis_url, await examine())
    monitor = Monitor(parts.store, health, settings.broker, examine, parts.experience.note_facts)
    running = asyncio.create_task(_run(parts, monitor, stop, health, drain_delay_s=3600))
    try:
        await asyncio.to_thread(eventually, lambda: health.unready() is None, "readiness")
        stop.set()
        await asyncio.to_thread(eventually, lambda: health.unready() == "draining", "the drain")
        clock.now_s += 2 * settings.broker.stall_timeout_s
        await asyncio.to_thread(eventually, lambda: not health.has_stalled(EVENT_LOOP), "a round of the loop")
        assert health.problem() is None
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await frame.close()
        await parts.store.aclose()
        await inspector.aclose()


def calls_a_second(callers: int, seconds: float = 20.0) -> float:
    """How often all together ask when each does what it is told."""
    now_s, calls, due = 0.0, 0, [0.0] * callers
    retry_times = RetryTimes(lambda: now_s)
    while (now_s := min(due)) < seconds:
        due[due.index(now_s)] = now_s + retry_times.after_ms() / 1000
        calls += 1
    return calls / seconds


def test_callers_share_what_all_may_ask_and_none_waits_longer_than_the_most() -> None:
    assert round(calls_a_second(1) * LEAST_S, 1) == 1.0
    assert calls_a_second(2) > 0.9 * 2 / LEAST_S
    for callers in (10, 50):
        assert 0.9 * CALLS_PER_S < calls_a_second(callers) < 1.1 * CALLS_PER_S
    assert calls_a_second(1000, 3.0) < 1.2 * 1000 / MOST_S
    now_s = 0.0
    retry_times = RetryTimes(lambda: now_s)
    assert max(retry_times.after_ms() for _ in range(1000)) == MOST_S * 1000
    now_s = 5.0
    assert retry_times.after_ms() == LEAST_S * 1000, "after a pause it is the least"


def test_an_append_beyond_the_ceiling_is_refused_as_full_with_the_figures() -> None:
    limit = StagingLimit(100)
    limit.take(60)
    with pytest.raises(Refused, match="60 of 100 bytes in flight, 41 asked") as caught:
        limit.take(41)
    assert caught.value.refusal.reason is Reason.FULL
    assert caught.value.refusal.retry_after_ms > 0
    limit.take(40)
    assert limit.staged_bytes == 100
    limit.give_back(60)
    limit.take(60)
    alone = StagingLimit(10)
    alone.take(50)
    with pytest.raises(Refused):
        alone.take(1)


class StoredWeights:
    def __init__(self) -> None:
        self.chunks: dict[tuple[int, int], bytes] = {}
        self.reads: list[tuple[int, int]] = []

    def put(self, version: int, blob: bytes) -> Publication:
        for index in range(-(-len(blob) // WEIGHT_CHUNK_BYTES)):
            begin = index * WEIGHT_CHUNK_BYTES
            self.chunks[version, index] = blob[begin : begin + WEIGHT_CHUNK_BYTES]
        sha256 = hashlib.sha256(blob).hexdigest()
        return Publication(version=version, update=version, sha256=sha256, size=len(blob))

    async def read(self, version: int, index: int) -> bytes | None:
        self.reads.append((version, index))
        await asyncio.sleep(0)
        return self.chunks.get((version, index))


async def test_a_version_is_read_once_for_all_actors_and_an_older_one_does_not_replace_it() -> None:
    stored = StoredWeights()
    older, newest = stored.put(1, b"old"), stored.put(2, bytes(range(256)) * 10_000)
    cache = WeightCache(stored.read)
    chunks = [await asyncio.gather(*(cache.chunk(newest, index) for _ in range(64))) for index in range(4)]
    assert [len(set(found)) for found in chunks] == [1] * 4
    assert b"".join(found[0] or b"" for found in chunks) == bytes(range(256)) * 10_000
    assert chunks[3][0] == b""
    reads = len(stored.reads)
    assert reads == len(set(stored.reads))
    assert await cache.chunk(older, 0) == b"old"
    assert await cache.chunk(newest, 0) == chunks[0][0]
    assert stored.reads[reads:] == [(1, 0)]
    assert await cache.chunk(Publication(version=9, size=5, sha256="0" * 64), 0) is None
    another_run = stored.put(1, b"of another run")
    assert await cache.chunk(another_run, 0) == b"of another run"


async def test_versions_beyond_the_bound_make_room_and_a_larger_one_is_not_kept() -> None:
    stored, blob = StoredWeights(), bytes(MAX_CACHED_BYTES // 2)
    first, second = stored.put(1, blob), stored.put(2, blob)
    cache = WeightCache(stored.read)
    for publication in (first, second, first):
        await cache.chunk(publication, 0)
    assert sum(kept.size for kept, _ in cache._held.values()) == MAX_CACHED_BYTES
    third = stored.put(3, b"one more")
    await cache.chunk(third, 0)
    assert cache.publication(1) == first
    assert cache.publication(2) is None
    large = Publication(version=4, update=4, sha256="0" * 64, size=MAX_CACHED_BYTES + 1)
    for _ in range(2):
        await cache.chunk(large, 0)
    assert stored.reads[-2:] == [(4, 0), (4, 0)]
    assert cache.publication(4) is None


async def test_only_published_bytes_are_served() -> None:
    stored = StoredWeights()
    publication = stored.put(4, b"good")
    stored.chunks[4, 0] = b"evil"
    cache = WeightCache(stored.read)
    for _ in range(2):
        with pytest.raises(CorruptWeights, match="version 4"):
            await cache.chunk(publication, 0)
