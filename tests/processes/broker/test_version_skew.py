"""Actors and brokers of different versions: they work together, or one says in words why they do not."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.actor.link.broker_client import BrokerClient, SessionReply
from penstock.protocol.messages import Role, Watch
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.runtime.exit import Fatal
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import refusal_pb2, weights_pb2
from tests.support.experience.fragment_messages import to_proto
from tests.support.network.network_run import (
    PATIENCE_S,
    NetworkRun,
    Sender,
    append,
    network_run,
    own_fragment,
)
from tests.support.run.harness import eventually
from tests.support.run.simulated_actor import SimulatedActor, code_of
from tests.support.storage.redis_server import RedisServer

UNKNOWN_FIELD = b"\xfa\xbb\x0b" + bytes([12]) + b"from tomorrow"[:12]
"""Field 23999, twelve bytes long: no message has it."""
TOMORROW = 99
COUNT = 50

Edit = Callable[[str, bytes], bytes]


def same(_method: str, message: bytes) -> bytes:
    return message


def newer(_method: str, message: bytes) -> bytes:
    return message + UNKNOWN_FIELD


def older(method: str, message: bytes) -> bytes:
    """Without what was added for convenience: an older peer does not say it."""
    if method != "WatchLatest":
        return message
    request = weights_pb2.WatchLatestRequest.FromString(message)
    for field in ("known_version", "known_begin_through", "known_revision", "applied_sha256"):
        request.ClearField(field)
    return request.SerializeToString()


class _Line(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Passes every call on, both messages edited."""

    def __init__(self, channel: grpc.Channel, on_request: Edit, on_reply: Edit) -> None:
        self._channel, self._on_request, self._on_reply = channel, on_request, on_reply

    def service(self, details: Any) -> Any:
        path, method = details.method, details.method.rpartition("/")[2]

        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            call: Callable[..., bytes] = self._channel.unary_unary(path, None, None)
            try:
                reply = call(self._on_request(method, request), timeout=context.time_remaining())
            except grpc.RpcError as error:
                context.abort(*code_of(error))
            return self._on_reply(method, reply)

        return grpc.unary_unary_rpc_method_handler(handle)


@contextmanager
def skewed(run: NetworkRun, on_request: Edit = same, on_reply: Edit = same) -> Iterator[str]:
    with grpc.insecure_channel(run.broker.address, options=CHANNEL_OPTIONS) as channel:
        server = grpc.server(futures.ThreadPoolExecutor(8), options=CHANNEL_OPTIONS)
        server.add_generic_rpc_handlers((_Line(channel, on_request, on_reply),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


def test_fields_unknown_to_one_side_change_nothing(redis_server: RedisServer, tmp_path: Path) -> None:
    with (
        network_run(redis_server, tmp_path) as run,
        skewed(run, newer, same) as newer_actor,
        skewed(run, same, newer) as newer_broker,
        skewed(run, older, same) as older_actor,
    ):
        addresses = (newer_actor, newer_broker, older_actor)
        run.senders += [Sender(address, f"a-{n}", COUNT) for n, address in enumerate(addresses)]
        for sender in run.senders:
            sender.start()
        assert run.finish() == COUNT * len(addresses)
        assert set(run.sessions().values()) == {1}


def test_a_header_of_a_newer_actor_goes_through_to_the_learner(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with network_run(redis_server, tmp_path) as run, SimulatedActor(run.broker.address, "a-0") as actor:
        actor.open()
        append(actor, 1)
        message = to_proto(own_fragment(actor.session, 2))
        message.header.MergeFromString(UNKNOWN_FIELD)
        while actor.begin_through < 2:
            actor.watch(wait_ms=1000, known_version=2**40)
        request = experience.AppendRequest(session=actor.session, acked_through=1, fragments=[message])
        assert actor.experience.Append(request, timeout=10).acked_through == 2
        eventually(lambda: run.is_sound() and len(run.reader.read) == 2, "the reader", PATIENCE_S)
        assert [name for name, _ in run.reader.read] == [(actor.session, 1), (actor.session, 2)]


def refuse_for_an_unknown_reason(method: str, message: bytes) -> bytes:
    kinds: dict[str, Any] = {
        "OpenSession": experience.OpenSessionReply,
        "Append": experience.AppendReply,
        "WatchLatest": weights_pb2.WatchLatestReply,
    }
    refusal = refusal_pb2.Refusal(detail="the moon is full")
    refusal.MergeFromString(bytes([8, TOMORROW]))
    return bytes(kinds[method](refusal=refusal).SerializeToString())


def state_of_tomorrow(method: str, message: bytes) -> bytes:
    if method != "WatchLatest":
        return message
    reply = weights_pb2.WatchLatestReply.FromString(message)
    reply.state = TOMORROW  # type: ignore[assignment]  # open enumerations take any number
    return reply.SerializeToString()


def test_an_unknown_reason_ends_an_actor_with_a_message(redis_server: RedisServer, tmp_path: Path) -> None:
    stop = threading.Event()
    with (
        network_run(redis_server, tmp_path) as run,
        skewed(run, same, refuse_for_an_unknown_reason) as address,
    ):
        broker_client = BrokerClient(address, Credentials())
        session = BrokerClient(run.broker.address, Credentials()).open_session("a-0", Role.ROLLOUT, stop)
        assert isinstance(session, SessionReply)
        calls: list[Callable[[], Any]] = [
            lambda: broker_client.open_session("a-0", Role.ROLLOUT, stop),
            lambda: broker_client.append(session.session, 0, [own_fragment(session.session, 1)], stop),
            lambda: broker_client.watch(Watch(session=session.session), stop),
        ]
        for call in calls:
            with pytest.raises(
                Fatal, match=f"{TOMORROW} is not a valid Reason; run the same version everywhere"
            ):
                call()
        broker_client.close()


def test_an_unknown_run_state_ends_an_actor_with_a_message(redis_server: RedisServer, tmp_path: Path) -> None:
    with network_run(redis_server, tmp_path) as run, skewed(run, same, state_of_tomorrow) as address:
        sender = Sender(address, "a-0", COUNT)
        sender.start()
        with pytest.raises(Fatal, match="run the same version everywhere"):
            sender.finish()


def test_a_call_unknown_to_the_broker_ends_an_actor_with_a_message(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with network_run(redis_server, tmp_path) as run, grpc.insecure_channel(run.broker.address) as channel:
        unknown: Callable[..., bytes] = channel.unary_unary("/penstock.v1.WeightService/Tomorrow", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            unknown(b"", timeout=5)
        assert code_of(caught.value)[0] is grpc.StatusCode.UNIMPLEMENTED
    empty = grpc.server(futures.ThreadPoolExecutor(1))
    broker_client = BrokerClient(f"127.0.0.1:{empty.add_insecure_port('127.0.0.1:0')}", Credentials())
    empty.start()
    with pytest.raises(Fatal, match="refuses this actor's calls: UNIMPLEMENTED"):
        broker_client.watch(Watch(session=1), threading.Event())
    broker_client.close()
    empty.stop(0).wait()


def test_a_role_that_the_broker_does_not_know_is_refused(redis_server: RedisServer, tmp_path: Path) -> None:
    with network_run(redis_server, tmp_path) as run, SimulatedActor(run.broker.address, "a-0") as actor:
        request = experience.OpenSessionRequest(actor_id="a-0")
        request.MergeFromString(bytes([16, TOMORROW]))
        with pytest.raises(grpc.RpcError) as caught:
            actor.experience.OpenSession(request, timeout=5)
        code, text = code_of(caught.value)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"role={TOMORROW}" in text
        assert run.open_sessions() == 0
