"""The broker's calls as functions of dataclasses, each with a deadline that leaves time for its bytes.

A call comes back with what the broker said, a refusal included. `penstock.actor.link.repeated_calls` sends it
again until it is answered. Used by several threads.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import grpc

from penstock.actor.link.repeated_calls import NotFound, RepeatedCalls
from penstock.protocol import append
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    APPEND_DEADLINE_S,
    CALL_DEADLINE_S,
    LEAST_BYTES_PER_S,
    WATCH_GRACE_S,
    WEIGHT_CHUNK_BYTES,
)
from penstock.protocol.messages import Credit, News, Publication, Report, Role, RunState, Watch
from penstock.protocol.refusal import Refusal
from penstock.protocol.specification import RunSpecification
from penstock.rpc import call_status
from penstock.rpc.auth import Credentials
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.v1 import experience_pb2, weights_pb2

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

_CHUNK_DEADLINE_S = CALL_DEADLINE_S + WEIGHT_CHUNK_BYTES / LEAST_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReply:
    """A session: its number, the run, the salt of its seeds and its first credit."""

    session: int
    specification: RunSpecification
    seed_salt: int
    credit: Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReply:
    """How far the log got, why no further, and credit to go on."""

    acked_through: int
    refusal: Refusal | None
    credit: Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes of a publication from `offset`; empty at the end."""

    publication: Publication
    data: memoryview


def _understood(method: Callable[P, T]) -> Callable[P, T]:
    """`method`; Fatal where the reply holds what this version has no name for (a reason, a state)."""

    @wraps(method)
    def reading(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return method(*arguments, **named)
        except ValueError as error:
            raise Fatal(
                f"a reply of the broker cannot be used: {error}; run the same version everywhere"
            ) from error

    return reading


class BrokerClient:
    """Calls to one broker."""

    def __init__(
        self, address: str, credentials: Credentials, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        """Raise ValueError for a malformed address or plaintext that was not asked for.

        on_answer: called after every answer, a refusal included, in the thread that asked.
        """
        self.address = address
        self._calls = RepeatedCalls(address, credentials, on_answer)

    @_understood
    def open_session(
        self, actor_id: str, role: Role, stop: threading.Event, *, describe_only: bool = False
    ) -> SessionReply | Refusal:
        """Open a session, or with `describe_only` only read the run's specification.

        Returns a Refusal where the broker says no. Raises Fatal for a specification that cannot be used, and
        Interrupted when `stop` is set before an answer comes.
        """
        request = experience_pb2.OpenSessionRequest(
            actor_id=actor_id,
            role=experience_pb2.Role.ValueType(role.value),
            describe_only=describe_only,
        )
        reply = self._calls.call(
            lambda connection: connection.experience.OpenSession, request, CALL_DEADLINE_S, stop
        )
        refusal = Refusal.from_proto(reply.refusal)
        if refusal is not None:
            return refusal
        try:
            specification = RunSpecification.from_proto(reply.specification)
        except ValueError as error:
            raise Fatal(
                f"the run specification cannot be used: {error}; run the same version everywhere"
            ) from error
        return SessionReply(
            session=reply.session,
            specification=specification,
            seed_salt=reply.seed_salt,
            credit=Credit.from_proto(reply.leave),
        )

    @_understood
    def append(
        self, session: int, acked_through: int, fragments: Sequence[Fragment], stop: threading.Event
    ) -> AppendReply:
        """Append, the same message each time it is repeated."""
        request = append.encode(session, acked_through, fragments)
        size = sum(len(fragment.payload) for fragment in fragments)
        metrics.FRAGMENT_BYTES_SENT.inc(size)
        deadline_s = APPEND_DEADLINE_S + size / LEAST_BYTES_PER_S
        repeated = lambda: metrics.FRAGMENTS_RESENT.inc(len(fragments))  # noqa: E731 - one use
        reply = self._calls.call(lambda connection: connection.append, request, deadline_s, stop, repeated)
        return AppendReply(
            acked_through=reply.acked_through,
            refusal=Refusal.from_proto(reply.refusal),
            credit=Credit.from_proto(reply.leave),
        )

    @_understood
    def report(self, report: Report, stop: threading.Event) -> tuple[int, Refusal | None]:
        """ReportEpisodes: last report taken, and why this one was not."""
        reply = self._calls.call(
            lambda connection: connection.experience.ReportEpisodes, report.to_proto(), CALL_DEADLINE_S, stop
        )
        return reply.acked_through, Refusal.from_proto(reply.refusal)

    def close_session(self, session: int, give_up_s: float) -> None:
        """CloseSession; a broker that does not answer in time closes the session by its timeout."""
        request = experience_pb2.CloseSessionRequest(session=session)
        try:
            self._calls.connection.experience.CloseSession(request, timeout=give_up_s)
        except grpc.RpcError as error:
            log.warning(
                "session not closed, it will expire",
                extra={"session": session, "error": call_status.text_of(error)},
            )

    @_understood
    def watch(self, watch: Watch, stop: threading.Event) -> News | Refusal:
        """WatchLatest; held by the broker for up to `watch.wait_ms`."""
        request = weights_pb2.WatchLatestRequest(
            session=watch.session,
            begun_through=watch.begun_through,
            known_version=watch.known_version,
            known_begin_through=watch.known_begin_through,
            known_revision=watch.known_revision,
            flushed=watch.flushed,
            applied_version=watch.applied_version,
            applied_sha256=watch.applied_sha256,
            probe_log_prob=watch.probe_log_prob,
            wait_ms=watch.wait_ms,
            gives_back=watch.gives_back,
        )
        deadline_s = watch.wait_ms / 1000 + WATCH_GRACE_S
        reply, weights = self._calls.call(lambda connection: connection.watch, request, deadline_s, stop)
        return Refusal.from_proto(reply.refusal) or _news(reply, bytes(weights))

    def weights(self, session: int, version: int, offset: int, stop: threading.Event) -> Chunk | None:
        """GetWeights from `offset`; None when the version is no longer kept."""
        request = weights_pb2.GetWeightsRequest(session=session, version=version, offset=offset)
        try:
            reply, data = self._calls.call(
                lambda connection: connection.weights, request, _CHUNK_DEADLINE_S, stop
            )
        except NotFound:
            return None
        return Chunk(publication=Publication.from_proto(reply.publication), data=data)

    def close(self) -> None:
        """End the channel; a call that is being held ends with CANCELLED."""
        self._calls.close()


def _news(reply: weights_pb2.WatchLatestReply, weights: bytes) -> News:
    return News(
        latest=Publication.from_proto(reply.latest),
        credit=Credit.from_proto(reply.leave),
        state=RunState(reply.state) if reply.state else RunState.RUNNING,
        revision=reply.revision,
        weights=weights,
        traffic_revision=reply.traffic_revision,
        flush=reply.flush,
        scalars=dict(reply.scalars),
        evaluate_version=reply.evaluate_version,
    )
