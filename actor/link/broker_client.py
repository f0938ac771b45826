"""Calls of an actor to its broker, repeated until they are answered, each with a deadline for its bytes."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

import grpc

from penstock.config.credentials import credentials
from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol import append
from penstock.protocol.append import read_beside
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    APPEND_DEADLINE_S,
    CALL_DEADLINE_S,
    LEAST_BYTES_PER_S,
    MAX_MESSAGE_BYTES,
    WATCH_GRACE_S,
    WEIGHT_CHUNK_BYTES,
)
from penstock.protocol.messages import Credit, News, Publication, Report, Role, RunState, Watch
from penstock.protocol.refusal import Refusal
from penstock.protocol.specification import RunSpecification
from penstock.rpc import gate
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.retry import Interrupted, retry
from penstock.v1 import experience_pb2, experience_pb2_grpc, weights_pb2

T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger(__name__)

_APPEND: Final = "/penstock.v1.ExperienceService/Append"
_WATCH: Final = "/penstock.v1.WeightService/WatchLatest"
_GET_WEIGHTS: Final = "/penstock.v1.WeightService/GetWeights"
_COMPLAIN_EVERY_S: Final = 10.0
_CHUNK_DEADLINE_S: Final = CALL_DEADLINE_S + WEIGHT_CHUNK_BYTES / LEAST_BYTES_PER_S


class Connection:
    """A channel with its stubs. last_answer_s: monotonic time of the last answer on it, in seconds."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.channel = open_channel(address, credentials)
        self.experience = experience_pb2_grpc.ExperienceServiceStub(self.channel)
        # Its requests are bytes.
        self.append = self.channel.unary_unary(
            _APPEND,
            request_serializer=bytes,
            response_deserializer=experience_pb2.AppendReply.FromString,
        )
        # Their replies are a message and its large field.
        self.watch = self.channel.unary_unary(
            _WATCH,
            request_serializer=weights_pb2.WatchLatestRequest.SerializeToString,
            response_deserializer=partial(
                read_beside, weights_pb2.WatchLatestReply, weights_pb2.WatchLatestReply.WEIGHTS_FIELD_NUMBER
            ),
        )
        self.weights = self.channel.unary_unary(
            _GET_WEIGHTS,
            request_serializer=weights_pb2.GetWeightsRequest.SerializeToString,
            response_deserializer=partial(
                read_beside, weights_pb2.GetWeightsReply, weights_pb2.GetWeightsReply.CHUNK_FIELD_NUMBER
            ),
        )
        self.last_answer_s = 0.0


class NotFound(Exception):
    """The broker knows no such thing."""


def _final(address: str, error: Exception) -> Exception:
    if gate.code_of(error) is grpc.StatusCode.NOT_FOUND:
        return NotFound(gate.text_of(error))
    if gate.is_too_large(error):
        return Fatal(
            f"a message between this actor and the broker at {address} is above the limit of "
            f"{MAX_MESSAGE_BYTES} bytes ({gate.text_of(error)}); lower actor.unroll_length or "
            "environment.count"
        )
    return Fatal(f"the broker at {address} refuses this actor's calls: {gate.text_of(error)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReply:
    """A session: its number, the run, the salt of its seeds and its first credit."""

    session: int
    specification: RunSpecification
    seed_salt: int
    credit: Credit


def _understood(method: Callable[P, T]) -> Callable[P, T]:
    """Wrap `method`: raise Fatal where a reply has a reason or a state that this version does not know."""

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
    """Calls to one broker, over a connection that is replaced when it is dead."""

    def __init__(
        self, address: str, credentials: Credentials, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        """Raise ValueError for a malformed address or plaintext that is not allowed.

        on_answer: called after every answer, a refusal included, in the thread of the call.
        """
        self.address, self._on_answer = address, on_answer
        self._credentials = credentials
        self._connection = Connection(address, credentials)
        self._changing = threading.Lock()
        self._closed = False
        self._complained_s = -_COMPLAIN_EVERY_S

    @_understood
    def open_session(
        self, actor_id: str, role: Role, stop: threading.Event, *, describe_only: bool = False
    ) -> SessionReply | Refusal:
        """Open a session, or with `describe_only` only read the run's specification.

        Returns the Refusal where the broker refuses. Raises Fatal for a specification that cannot be used,
        Interrupted when `stop` is set before an answer comes.
        """
        request = experience_pb2.OpenSessionRequest(
            actor_id=actor_id,
            role=experience_pb2.Role.ValueType(role.value),
            describe_only=describe_only,
        )
        reply = self._call(
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
    ) -> tuple[int, Refusal | None, Credit]:
        """Call Append; a repeated call sends the same message.

        Returns how far the log got, why no further, and credit to go on.
        """
        request = append.encode(session, acked_through, fragments)
        size = sum(len(fragment.payload) for fragment in fragments)
        metrics.FRAGMENT_BYTES_SENT.inc(size)
        deadline_s = APPEND_DEADLINE_S + size / LEAST_BYTES_PER_S
        repeated = lambda: metrics.FRAGMENTS_RESENT.inc(len(fragments))  # noqa: E731 - one use
        reply = self._call(lambda connection: connection.append, request, deadline_s, stop, repeated)
        return reply.acked_through, Refusal.from_proto(reply.refusal), Credit.from_proto(reply.leave)

    @_understood
    def report(self, report: Report, stop: threading.Event) -> tuple[int, Refusal | None]:
        """Call ReportEpisodes; returns the last accepted report, and the refusal of this one or None."""
        reply = self._call(
            lambda connection: connection.experience.ReportEpisodes, report.to_proto(), CALL_DEADLINE_S, stop
        )
        return reply.acked_through, Refusal.from_proto(reply.refusal)

    def close_session(self, session: int, give_up_s: float) -> None:
        """CloseSession; a broker that does not answer in time closes the session by its timeout."""
        request = experience_pb2.CloseSessionRequest(session=session)
        try:
            self._connection.experience.CloseSession(request, timeout=give_up_s)
        except grpc.RpcError as error:
            log.warning(
                "session not closed, it will expire",
                extra={"session": session, "error": gate.text_of(error)},
            )

    @_understood
    def watch(self, watch: Watch, stop: threading.Event) -> News | Refusal:
        """WatchLatest; held by the broker for up to `watch.wait_ms`."""
        request = weights_pb2.WatchLatestRequest(**asdict(watch))
        deadline_s = watch.wait_ms / 1000 + WATCH_GRACE_S
        reply, weights = self._call(lambda connection: connection.watch, request, deadline_s, stop)
        return Refusal.from_proto(reply.refusal) or _news(reply, bytes(weights))

    def weights(
        self, session: int, version: int, offset: int, stop: threading.Event
    ) -> tuple[Publication, memoryview] | None:
        """Return the weights' bytes from `offset`, empty at the end; None when the version is not kept."""
        request = weights_pb2.GetWeightsRequest(session=session, version=version, offset=offset)
        try:
            reply, data = self._call(lambda connection: connection.weights, request, _CHUNK_DEADLINE_S, stop)
        except NotFound:
            return None
        return Publication.from_proto(reply.publication), data

    def close(self) -> None:
        """End the channel; a call that is being held ends with CANCELLED."""
        with self._changing:
            self._closed = True
            self._connection.channel.close()

    def _call(
        self,
        method: Callable[[Connection], Callable[..., T]],
        request: Any,
        deadline_s: float,
        stop: threading.Event,
        on_repeat: Callable[[], Any] = lambda: None,
    ) -> T:
        """Return the reply to a request, which is the same each time it is sent again.

        method: the stub of the call on a connection. deadline_s: of each attempt. on_repeat: called before
        each further attempt; none is made when `stop` is set. Raises Interrupted, NotFound, and Fatal where
        the same call would get the same answer again.
        """

        def on_wait(error: Exception, delay_s: float) -> None:
            metrics.RECONNECTS.inc()
            self._complain(error, delay_s)
            on_repeat()

        try:
            return retry(
                lambda: self._attempt(method, request, deadline_s),
                retryable=lambda error: gate.is_repeatable(error) and not stop.is_set(),
                stop=stop,
                on_wait=on_wait,
            )
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under the call
            if stop.is_set():
                raise Interrupted from error
            raise _final(self.address, error) from error

    def _attempt(
        self, method: Callable[[Connection], Callable[..., T]], request: Any, deadline_s: float
    ) -> T:
        connection = self._connection
        try:
            reply = method(connection)(request, timeout=deadline_s)
        except ValueError:
            if self._closed or connection is self._connection:
                raise
            # Another thread took a new connection before this call began.
            return self._attempt(method, request, deadline_s)
        except grpc.RpcError as error:
            if gate.code_of(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                connection.last_answer_s = time.monotonic()
            elif connection.last_answer_s < time.monotonic() - deadline_s / 2:
                self._replace(connection)
            raise
        connection.last_answer_s = time.monotonic()
        self._on_answer()
        return reply

    def _replace(self, connection: Connection) -> None:
        """A new connection instead of `connection`; calls that hang on the old one end with CANCELLED."""
        with self._changing:
            if self._closed or connection is not self._connection:
                return
            self._connection = Connection(self.address, self._credentials)
        connection.channel.close()

    def _complain(self, error: Exception, delay_s: float) -> None:
        now = time.monotonic()
        if now - self._complained_s >= _COMPLAIN_EVERY_S:
            self._complained_s = now
            log.warning(
                "the broker does not answer, trying again",
                extra={"broker": self.address, "error": gate.text_of(error), "delay_s": delay_s},
            )


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


def connect(broker: str, settings: Settings, on_answer: Callable[[], None] = lambda: None) -> BrokerClient:
    """Raise ConfigurationError for an address or files that cannot be used. on_answer: see `BrokerClient`."""
    try:
        return BrokerClient(broker, credentials(settings.security), on_answer)
    except ValueError as error:
        raise ConfigurationError(f"--broker: {error}") from error
