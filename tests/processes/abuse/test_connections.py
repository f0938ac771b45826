"""Peers that misuse connections: idle ones, replies left unread, messages half sent, bombs and floods.

Each ends with the honest actors served as before, the broker's memory bounded, its descriptors given back."""

import os
import signal
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest

from penstock.broker.log.connection import MAX_CONNECTIONS
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.protocol.messages import Role
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import weights_pb2
from tests.support.abuse.stage import (
    SETTLED_BY,
    Memory,
    Stage,
    memory_within,
    nothing_stored,
    open_files,
    session_of,
    staged,
    unharmed,
)
from tests.support.abuse.wire import (
    CANCEL,
    DATA,
    EXPERIENCE,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WEIGHTS,
    WINDOW_UPDATE,
    Answer,
    Connection,
    RawChannel,
    answer_of,
    frame,
)
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.harness import eventually
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import fragment

PATIENCE_S: Final = 60
STREAMS: Final = 64
"""Calls that one connection may have open."""
GET_WEIGHTS: Final = f"{WEIGHTS}GetWeights"
CONTINUATION: Final = 9
FLOOD: Final = 20_000
SLACK_FILES: Final = MAX_CONNECTIONS + 8
"""Descriptors that come and go: the pool of connections to Redis, honest actors."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage")) as ready:
        ready.learner.publish(os.urandom(MIB), update=1, settled=0, scalars={})
        yield ready


def _chunk() -> bytes:
    return weights_pb2.GetWeightsRequest(session=1, version=2).SerializeToString()


def _given_back(pid: int, before: int) -> None:
    eventually(lambda: open_files(pid) <= before + SLACK_FILES, "closed descriptors", PATIENCE_S)


@pytest.mark.parametrize("greeted", [False, True], ids=["silent", "greeted"])
def test_five_hundred_idle_connections_do_not_slow_others(stage: Stage, greeted: bool) -> None:
    pid = stage.broker.process.pid
    before = open_files(pid)
    host, _, port = stage.address.rpartition(":")
    with unharmed(stage), memory_within(pid, 64 * MIB), ExitStack() as stack:
        for _ in range(500):
            if greeted:
                stack.enter_context(Connection(stage.address))
            else:
                stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        eventually(lambda: open_files(pid) >= before + 450, "500 connections", PATIENCE_S)
        with RawChannel(stage.address) as channel:
            assert channel.send(GET_WEIGHTS, _chunk()).code is grpc.StatusCode.OK
    _given_back(pid, before)


def test_unread_replies_are_limited(stage: Stage) -> None:
    pid = stage.broker.process.pid
    before = open_files(pid)
    with unharmed(stage), memory_within(pid, 1024 * MIB):
        for _ in range(2):
            with ExitStack() as stack, RawChannel(stage.address) as channel:
                for _ in range(20):
                    connection = stack.enter_context(Connection(stage.address, window=0))
                    for _ in range(STREAMS):
                        connection.call(GET_WEIGHTS, _chunk())
                # Who reads is served while the others hold what they may. gRPC's server refuses a share of
                # new calls (CANCELLED) while more than 1,000 wait for it: a reader asks again, as clients do.
                eventually(
                    lambda: channel.send(GET_WEIGHTS, _chunk()).code is grpc.StatusCode.OK,
                    "an answer to who reads",
                    PATIENCE_S,
                )
        _given_back(pid, before)


def test_calls_of_a_caller_that_reads_nothing_are_refused(stage: Stage) -> None:
    with unharmed(stage), Connection(stage.address, window=0) as slow:
        for _ in range(STREAMS):
            slow.call(GET_WEIGHTS, _chunk())
        seen = b""
        while seen.count(b"not read yet") < 1 and seen.count(b"RESOURCE_EXHAUSTED") < 1:
            data = slow.socket.recv(65_536)
            assert data, "closed without a word"
            seen += data


def test_half_sent_messages_delay_no_other_call(stage: Stage) -> None:
    pid = stage.broker.process.pid
    before = open_files(pid)
    with unharmed(stage), nothing_stored(stage), memory_within(pid, 128 * MIB), ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(Connection(stage.address))
            for _ in range(STREAMS):
                # The window of a connection is not widened for who does not wait for it.
                connection.half_a_call(f"{EXPERIENCE}Append", b"", MAX_MESSAGE_BYTES)
                connection.send(frame(DATA, 0, connection.stream, bytes(16_000)))
        with RawChannel(stage.address) as channel:
            assert channel.send(GET_WEIGHTS, _chunk()).code is grpc.StatusCode.OK
    _given_back(pid, before)


def _rapid_reset(connection: Connection) -> None:
    """CVE-2023-44487: calls that are cancelled as they begin."""
    for _ in range(FLOOD):
        begun = connection.headers(GET_WEIGHTS)
        connection.send(begun + frame(RST_STREAM, 0, connection.stream, struct.pack(">I", CANCEL)))


def _repeated(sent: bytes, times: int = FLOOD) -> Callable[[Connection], None]:
    def flood(connection: Connection) -> None:
        for _ in range(times):
            connection.send(sent)

    return flood


def _endless_headers(connection: Connection) -> None:
    """CVE-2024-27316 and its kin: a header block without an end."""
    connection.send(frame(HEADERS, 0, 1, b"\0\x01a\x7f\xff\xff\xff\x07"))
    for _ in range(2_000):
        connection.send(frame(CONTINUATION, 0, 1, b"x" * 16_000))


def _metadata(connection: Connection) -> None:
    for _ in range(200):
        connection.send(connection.headers(GET_WEIGHTS, [("x", "y" * 10_000)] * 8))


FLOODS: Final[dict[str, Callable[[Connection], None]]] = {
    "rapid reset": _rapid_reset,
    "pings": _repeated(frame(PING, 0, 0, b"12345678")),
    "settings": _repeated(frame(SETTINGS, 0, 0)),
    "window updates": _repeated(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1))),
    "endless headers": _endless_headers,
    "large metadata": _metadata,
    "frame above the limit": lambda c: c.send(
        c.headers(GET_WEIGHTS) + b"\xff\xff\xff" + bytes([DATA, 0]) + bytes(8 * MIB)
    ),
    "garbage": lambda c: c.send(os.urandom(8 * MIB)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_hurts_only_its_sender(stage: Stage, name: str) -> None:
    pid = stage.broker.process.pid
    before = open_files(pid)
    with unharmed(stage), nothing_stored(stage), memory_within(pid, 64 * MIB):
        with Connection(stage.address) as connection:
            try:
                FLOODS[name](connection)
            except OSError:
                assert connection.is_closed()
        with RawChannel(stage.address) as channel:
            assert channel.send(GET_WEIGHTS, _chunk()).code is grpc.StatusCode.OK
    _given_back(pid, before)


def test_a_health_watcher_that_does_not_read_does_not_delay_draining(short_folder: Path) -> None:
    with staged(short_folder) as stage, Connection(stage.address, window=0) as slow:
        slow.call("/grpc.health.v1.Health/Watch", b"")
        slow.read_until(HEADERS)
        stage.broker.process.send_signal(signal.SIGTERM)
        assert stage.broker.process.wait(PATIENCE_S) == 0


BOMB_BYTES: Final = 256 * MIB
"""Zeros: they arrive as a quarter of a MiB."""
BOMBS: Final = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@pytest.mark.parametrize("name", BOMBS)
def test_a_compression_bomb_is_refused_before_it_is_decompressed(stage: Stage, name: str) -> None:
    pid = stage.broker.process.pid
    with (
        unharmed(stage),
        nothing_stored(stage),
        memory_within(pid, 64 * MIB),
        RawChannel(stage.address) as channel,
    ):
        answer = channel.send(f"{EXPERIENCE}Append", bytes(BOMB_BYTES), compression=BOMBS[name])
    assert answer.code is grpc.StatusCode.UNIMPLEMENTED, answer
    assert name in answer.text


HONEST: Final = 4
CALLS_PER_S: Final = 100.0
"""Budget of one connection: far below what a flood asks, so that the test sees it hold."""
HONEST_S: Final = 60.0
"""Of an honest call, which waits behind a thousand held ones that came at once."""
WINDOW: Final = 64
GROWTH_BYTES: Final = 64 * MIB
REFUSED_STREAM: Final = "error code 7"
"""How HTTP/2 says that a connection has more calls open than it may; nothing of this one was looked at."""


def _is_turned_away(answer: Answer) -> bool:
    if answer.code is grpc.StatusCode.UNAVAILABLE:
        return REFUSED_STREAM in answer.text
    return answer.code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture
def paced(short_folder: Path) -> Iterator[Stage]:
    with staged(short_folder, {"broker": {"max_calls_per_s": CALLS_PER_S}}) as ready:
        yield ready


class Crowd:
    """Honest actors, each sending its fragments one behind the other; `seconds` of every call."""

    def __init__(self, stage: Stage, fragments_each: int) -> None:
        self._stage, self._each = stage, fragments_each
        self.seconds: list[float] = []
        self.sessions: list[int] = []

    def work(self) -> None:
        with ThreadPoolExecutor(HONEST) as pool:
            list(pool.map(self._one, range(HONEST)))

    def _one(self, index: int) -> None:
        with SimulatedActor(self._stage.address, f"honest-{index}", deadline_s=HONEST_S) as actor:
            actor.open()
            self.sessions.append(actor.session)
            while actor.acked_through < self._each:
                if actor.acked_through >= actor.begin_through:
                    self._stage.learner.settle(SETTLED_BY)
                    actor.watch()
                    continue
                sequence = actor.acked_through + 1
                began = time.perf_counter()
                reply = actor.send(fragment(actor.session, sequence))
                self.seconds.append(time.perf_counter() - began)
                assert reply.acked_through == sequence, reply

    def p99_ms(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98] * 1000


def _in_order(stage: Stage, crowd: Crowd, each: int) -> None:
    """The log holds the fragments of the honest actors alone, each once and in order."""
    found: dict[int, list[int]] = {}
    after = 0
    while entries := stage.learner.read(after, 1000, 0):
        for entry in entries:
            assert entry.header is not None
            found.setdefault(entry.header.session, []).append(entry.header.sequence)
        after = entries[-1].number
    assert found == {session: list(range(1, each + 1)) for session in crowd.sessions}


@contextmanager
def _meanwhile(flood: Callable[[threading.Event], None]) -> Iterator[None]:
    """`flood(over)` runs in a thread of its own; what it raises is raised here."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(flood, over)
        try:
            yield
        finally:
            over.set()
        running.result()


class Flood:
    """Calls as fast as they go, WINDOW of them in flight."""

    def __init__(self, address: str, path: str, data: bytes, most: int) -> None:
        self._address, self._path, self._data, self._most = address, path, data, most
        self.seen: Counter[str] = Counter()
        self.begun = threading.Event()
        self.seconds = 0.0

    def __call__(self, over: threading.Event) -> None:
        flying: list[object] = []
        began = time.monotonic()
        with RawChannel(self._address) as channel:
            for _ in range(self._most):
                flying.append(channel.start(self._path, self._data))
                if len(flying) >= WINDOW:
                    self._note(answer_of(flying.pop(0)))
                if over.is_set():
                    break
            for future in flying:
                self._note(answer_of(future))
        self.seconds = time.monotonic() - began

    def _note(self, answer: Answer) -> None:
        assert _is_turned_away(answer), answer
        self.seen[answer.code.name] += 1
        self.begun.set()


def _floods(session: int) -> dict[str, tuple[str, bytes]]:
    gap = experience.AppendRequest(session=session, fragments=[to_proto(fragment(session, 9_000))])
    unfit = experience.AppendRequest(session=session, fragments=[to_proto(fragment(session, 1, run="run-b"))])
    watch = weights_pb2.WatchLatestRequest(session=session)
    return {
        "appends with a gap": (f"{EXPERIENCE}Append", gap.SerializeToString()),
        "appends that are refused": (f"{EXPERIENCE}Append", unfit.SerializeToString()),
        "watches": (f"{WEIGHTS}WatchLatest", watch.SerializeToString()),
    }


@pytest.mark.parametrize("name", ["appends with a gap", "appends that are refused", "watches"])
@pytest.mark.parametrize(
    ("calls", "each"),
    [(10_000, 40), pytest.param(100_000, 1_000, marks=pytest.mark.slow)],
    ids=["fast", "big"],
)
def test_an_actor_at_a_hundred_times_the_rate_does_not_stop_others(
    paced: Stage, name: str, calls: int, each: int
) -> None:
    stage = paced
    memory = Memory(stage.broker.process.pid)
    quiet, crowd = Crowd(stage, each), Crowd(stage, each)
    with session_of(stage, "flood", Role.EVALUATION) as actor:
        flood = Flood(stage.address, *_floods(actor.session)[name], calls)
        quiet.work()
        resident = memory.resident()
        with _meanwhile(flood):
            assert flood.begun.wait(60)
            crowd.work()
    quiet.sessions += crowd.sessions
    _in_order(stage, quiet, each)
    print(f"{name}: {dict(flood.seen)}; p99 {quiet.p99_ms():.1f} ms quiet, {crowd.p99_ms():.1f} ms under it")
    assert flood.seen["OK"] <= CALLS_PER_S * (flood.seconds + 1) + 1
    assert memory.resident() - resident <= GROWTH_BYTES


def test_held_calls_of_one_peer_do_not_stop_the_others(paced: Stage) -> None:
    stage = paced
    memory = Memory(stage.broker.process.pid)
    crowd = Crowd(stage, 40)
    with session_of(stage, "flood", Role.EVALUATION) as actor, ExitStack() as stack:
        known = weights_pb2.WatchLatestRequest(
            session=actor.session, wait_ms=30_000, known_version=2**40, known_revision=2**40
        )
        held = [
            channel.start(f"{WEIGHTS}WatchLatest", known.SerializeToString())
            for channel in (stack.enter_context(RawChannel(stage.address)) for _ in range(20))
            for _ in range(WINDOW)
        ]
        resident = memory.resident()
        crowd.work()
        stage.learner.publish(b"weights-2", update=1, settled=0, scalars={})
        for call in held:
            call.cancel()
    _in_order(stage, crowd, 40)
    assert memory.resident() - resident <= GROWTH_BYTES


@pytest.mark.parametrize("names", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flood_of_names_does_not_stop_working_actors(short_folder: Path, names: int) -> None:
    with (
        staged(short_folder) as stage,
        session_of(stage, "honest") as honest,
        RawChannel(stage.address) as channel,
    ):
        assert honest.send(fragment(honest.session, 1)).acked_through == 1
        flying: list[object] = []
        for index in range(names):
            request = experience.OpenSessionRequest(actor_id=f"n-{index}", role=experience.ROLE_ROLLOUT)
            flying.append(channel.start(f"{EXPERIENCE}OpenSession", request.SerializeToString()))
            if len(flying) >= WINDOW:
                assert _is_turned_away(answer_of(flying.pop(0)))
        assert all(_is_turned_away(answer_of(future)) for future in flying)
        assert honest.send(fragment(honest.session, 2)).acked_through == 2
        assert channel.send("/penstock.v1.ControlService/Status", b"").code is grpc.StatusCode.OK
        assert stage.broker.get("/readyz")[0] == 200
