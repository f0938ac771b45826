"""An actor without environment or policy: sessions, credit, fragments and an outbox over real gRPC."""

from typing import Any, Self

import grpc

from penstock.protocol.messages import Role
from penstock.protocol.refusal import Refusal
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import experience_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.small_run import fragment

DEADLINE_S = 10


class SimulatedActor:
    """One actor at a broker; calls block, each for `deadline_s` at most and the wait that it asks for.

    `acked_through` is the highest sequence number acknowledged.
    """

    def __init__(
        self, address: str, actor_id: str, role: Role = Role.ROLLOUT, *, deadline_s: float = DEADLINE_S
    ) -> None:
        self.channel = open_channel(address, Credentials())
        self.experience = experience_pb2_grpc.ExperienceServiceStub(self.channel)
        self.weights = weights_pb2_grpc.WeightServiceStub(self.channel)
        self.actor_id, self.role, self._deadline_s = actor_id, role, deadline_s
        self.session = self.begin_through = self.version = self.acked_through = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.channel.close()

    def open(self) -> experience.OpenSessionReply:
        """Open a session; raises AssertionError when it is refused."""
        request = experience.OpenSessionRequest(
            actor_id=self.actor_id, role=experience.Role.ValueType(self.role)
        )
        reply = self.experience.OpenSession(request, timeout=self._deadline_s)
        assert not reply.refusal.reason, reply.refusal
        self.session, self.acked_through = reply.session, 0
        self.begin_through, self.version = reply.leave.begin_through, reply.leave.min_version
        return reply

    def send(self, *given: Any) -> experience.AppendReply:
        request = experience.AppendRequest(
            session=self.session,
            acked_through=self.acked_through,
            fragments=[to_proto(each) for each in given],
        )
        reply = self.experience.Append(request, timeout=self._deadline_s)
        self.acked_through = max(self.acked_through, reply.acked_through)
        self.begin_through = max(self.begin_through, reply.leave.begin_through)
        return reply

    def send_all_with_credit(self, at_most: int = 64) -> experience.AppendReply:
        last = min(self.begin_through, self.acked_through + at_most)
        return self.send(
            *(fragment(self.session, sequence) for sequence in range(self.acked_through + 1, last + 1))
        )

    def watch(self, wait_ms: int = 0, **known: Any) -> weights_pb2.WatchLatestReply:
        request = weights_pb2.WatchLatestRequest(session=self.session, wait_ms=wait_ms, **known)
        reply = self.weights.WatchLatest(request, timeout=wait_ms / 1000 + self._deadline_s)
        self.begin_through = max(self.begin_through, reply.leave.begin_through)
        return reply


def refusal_of(reply: Any) -> Refusal:
    refusal = Refusal.from_proto(reply.refusal)
    assert refusal is not None
    return refusal


def code_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    call: object = error  # the types keep grpc.RpcError and grpc.Call apart, a failed call is both
    assert isinstance(call, grpc.Call)
    return call.code(), str(call.details())
