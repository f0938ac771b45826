"""What the link repeats and what it gives up on."""

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace

import grpc
import pytest

from penstock.actor.link.session import BrokerClient
from penstock.protocol.limits import APPEND_DEADLINE_S, MAX_MESSAGE_BYTES, MIB, WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Report, Watch
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.runtime.exit import Fatal
from penstock.v1 import experience_pb2, experience_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.support.run import small_run

MEGABIT = 125_000
HEARD_S = 0.5
"""How long a connection is heard of after a watch began on it: less than half the deadline of the watch."""


@pytest.fixture
def address() -> Iterator[str]:
    """A server that knows no method."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


class Clock(experience_pb2_grpc.ExperienceServiceServicer, weights_pb2_grpc.WeightServiceServicer):
    """Notes how much time each call was given, in seconds."""

    def __init__(self) -> None:
        self.given_s: dict[str, float] = {}

    def Append(  # noqa: N802 - the name of the RPC
        self, request: experience_pb2.AppendRequest, context: grpc.ServicerContext
    ) -> experience_pb2.AppendReply:
        """Takes nothing."""
        self.given_s[f"append {len(request.fragments)}"] = context.time_remaining() or 0.0
        return experience_pb2.AppendReply()

    def GetWeights(  # noqa: N802 - the name of the RPC
        self, request: weights_pb2.GetWeightsRequest, context: grpc.ServicerContext
    ) -> weights_pb2.GetWeightsReply:
        """No bytes."""
        self.given_s["weights"] = context.time_remaining() or 0.0
        return weights_pb2.GetWeightsReply()


def test_a_deadline_leaves_time_for_the_bytes_of_a_thin_line() -> None:
    clock = Clock()  # type: ignore[abstract]  # the other calls are not made
    stop = threading.Event()
    server = grpc.server(futures.ThreadPoolExecutor(1), options=CHANNEL_OPTIONS)
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(clock, server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(clock, server)
    answers: list[str] = []
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    broker_client = BrokerClient(address, Credentials(), lambda: answers.append("answer"))
    server.start()
    large = replace(small_run.fragment(1), payload=b"\0" * (2 * MIB))
    broker_client.append(1, 0, [], stop)
    broker_client.append(1, 0, [large] * 3, stop)
    broker_client.weights(1, 1, 0, stop)
    broker_client.close()
    server.stop(0)
    assert len(answers) == 3
    # On its way gRPC rounds a deadline up, to three digits.
    assert clock.given_s["append 0"] <= APPEND_DEADLINE_S * 1.02
    assert clock.given_s["append 3"] >= 6 * MIB / MEGABIT
    assert clock.given_s["weights"] >= WEIGHT_CHUNK_BYTES / MEGABIT


class Silent(experience_pb2_grpc.ExperienceServiceServicer, weights_pb2_grpc.WeightServiceServicer):
    """Holds the first watch until the test is over; a report that is sent meanwhile is answered."""

    def __init__(self) -> None:
        self.callers: list[str] = []
        self.watched, self.over = threading.Event(), threading.Event()

    def WatchLatest(  # noqa: N802 - the name of the RPC
        self, request: weights_pb2.WatchLatestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.WatchLatestReply:
        """The second one is answered."""
        self.callers.append(context.peer())
        self.watched.set()
        if len(self.callers) == 1:
            self.over.wait(20)
        return weights_pb2.WatchLatestReply()

    def ReportEpisodes(  # noqa: N802 - the name of the RPC
        self, request: experience_pb2.ReportEpisodesRequest, context: grpc.ServicerContext
    ) -> experience_pb2.ReportEpisodesReply:
        """Something is heard on the connection, soon after the watch began."""
        return experience_pb2.ReportEpisodesReply(acked_through=request.sequence)


def test_what_was_heard_as_a_watch_began_does_not_keep_a_dead_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.actor.link.session.WATCH_GRACE_S", 4 * HEARD_S)
    silent, stop = Silent(), threading.Event()  # type: ignore[abstract]  # the other calls are not made
    server = grpc.server(futures.ThreadPoolExecutor(4), options=CHANNEL_OPTIONS)
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(silent, server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(silent, server)
    broker_client = BrokerClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", Credentials())
    server.start()
    watcher = threading.Thread(target=lambda: broker_client.watch(Watch(session=1), stop))
    watcher.start()
    assert silent.watched.wait(20)
    began, reported = time.monotonic(), 0
    while time.monotonic() - began < HEARD_S:
        reported += 1
        broker_client.report(Report(session=1, sequence=reported, episodes=()), stop)
    watcher.join(20)
    silent.over.set()
    broker_client.close()
    server.stop(0)
    first, second = silent.callers
    assert first != second


def test_a_fragment_above_the_message_limit_is_fatal_and_never_sent_again(address: str) -> None:
    broker_client, stop = BrokerClient(address, Credentials()), threading.Event()
    big = replace(small_run.fragment(1), payload=b"\0" * (MAX_MESSAGE_BYTES + 1))
    give_up = threading.Timer(20, stop.set)
    give_up.start()
    try:
        with pytest.raises(Fatal, match=rf"limit of {MAX_MESSAGE_BYTES} bytes .*larger than max \(83\d+"):
            broker_client.append(1, 0, [big], stop)
    finally:
        give_up.cancel()
        broker_client.close()
