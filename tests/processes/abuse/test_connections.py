"""Peers that misuse connections: idle ones, replies left unread, messages half sent, floods of frames.

Each ends with the honest actor served as before, the broker's memory bounded, its descriptors given back.
"""

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import pytest

from penstock.broker.log.connection import MAX_CONNECTIONS
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.v1 import weights_pb2
from tests.support.abuse.stage import Stage, memory_within, nothing_stored, open_files, staged, unharmed
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
    Connection,
    RawChannel,
    frame,
)
from tests.support.run.harness import eventually

PATIENCE_S: Final = 60
STREAMS: Final = 64
"""Calls that one connection may have open."""
OVER: Final = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})
"""Its deadline, or a connection with more calls open than it may."""
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
def test_five_hundred_idle_connections_take_nothing_from_others(stage: Stage, greeted: bool) -> None:
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


def test_replies_that_are_not_read_are_bounded(stage: Stage) -> None:
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


def test_a_caller_that_reads_nothing_is_refused_more(stage: Stage) -> None:
    with unharmed(stage), Connection(stage.address, window=0) as slow:
        for _ in range(STREAMS):
            slow.call(GET_WEIGHTS, _chunk())
        seen = b""
        while seen.count(b"not read yet") < 1 and seen.count(b"RESOURCE_EXHAUSTED") < 1:
            data = slow.socket.recv(65_536)
            assert data, "closed without a word"
            seen += data


def test_messages_that_are_half_sent_hold_up_no_other_call(stage: Stage) -> None:
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


def _pings(connection: Connection) -> None:
    for _ in range(FLOOD):
        connection.send(frame(PING, 0, 0, b"12345678"))


def _settings(connection: Connection) -> None:
    for _ in range(FLOOD):
        connection.send(frame(SETTINGS, 0, 0))


def _window_updates(connection: Connection) -> None:
    for _ in range(FLOOD):
        connection.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)))


def _endless_headers(connection: Connection) -> None:
    """CVE-2024-27316 and its kin: a header block without an end."""
    connection.send(frame(HEADERS, 0, 1, b"\0\x01a\x7f\xff\xff\xff\x07"))
    for _ in range(2_000):
        connection.send(frame(CONTINUATION, 0, 1, b"x" * 16_000))


def _metadata(connection: Connection) -> None:
    for _ in range(200):
        connection.send(connection.headers(GET_WEIGHTS, [("x", "y" * 10_000)] * 8))


def _large_frame(connection: Connection) -> None:
    connection.send(connection.headers(GET_WEIGHTS) + b"\xff\xff\xff" + bytes([DATA, 0]) + bytes(8 * MIB))


def _garbage(connection: Connection) -> None:
    connection.send(os.urandom(8 * MIB))


FLOODS: Final[dict[str, Callable[[Connection], None]]] = {
    "rapid reset": _rapid_reset,
    "pings": _pings,
    "settings": _settings,
    "window updates": _window_updates,
    "endless headers": _endless_headers,
    "large metadata": _metadata,
    "frame above the limit": _large_frame,
    "garbage": _garbage,
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_hurts_only_who_sends_it(stage: Stage, name: str) -> None:
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


def test_a_call_without_a_message_ends_with_its_deadline(stage: Stage) -> None:
    pid = stage.broker.process.pid
    with unharmed(stage), memory_within(pid, 32 * MIB), RawChannel(stage.address) as channel:
        call = channel.channel.stream_unary(GET_WEIGHTS, None, None)
        for _ in range(20):
            futures = [call.future(iter(()), timeout=0.2) for _ in range(50)]
            assert {future.code() for future in futures} <= OVER


def test_a_health_watcher_that_reads_nothing_does_not_hold_up_the_drain(short_folder: Path) -> None:
    with staged(short_folder) as stage, Connection(stage.address, window=0) as slow:
        slow.call("/grpc.health.v1.Health/Watch", b"")
        slow.read_until(HEADERS)
        stage.broker.process.send_signal(signal.SIGTERM)
        assert stage.broker.process.wait(PATIENCE_S) == 0
