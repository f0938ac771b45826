"""Calls over one connection to a broker, repeated until they are answered. Used by several threads.

When it is not known whether the broker heard (it is down, it restarts, the deadline passed) the same request
is sent again with full jitter until it is answered or `stop` is set (Interrupted); every call is safe to
repeat. What no repetition changes (a malformed request, no permission, a message above the limit) is Fatal.

A connection leads nowhere, whatever the operating system thinks of it, when a deadline passes on it and
nothing at all was heard for the second half of that time: the calls go on over a new one. The first half does
not count, because what came just after the call began would keep a dead connection for another deadline, and
two of those that watch are as long as a session lives.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import grpc

from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.rawproto import read_beside
from penstock.rpc import call_status
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.retry import Interrupted, retry
from penstock.v1 import experience_pb2, experience_pb2_grpc, weights_pb2

T = TypeVar("T")
log = logging.getLogger(__name__)

_APPEND: Final = "/penstock.v1.ExperienceService/Append"
_WATCH: Final = "/penstock.v1.WeightService/WatchLatest"
_GET_WEIGHTS: Final = "/penstock.v1.WeightService/GetWeights"
_COMPLAIN_EVERY_S: Final = 10.0


class Connection:
    """A channel with its stubs.

    heard_s: when anything was last heard on it, in monotonic seconds.
    """

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
        self.heard_s = 0.0


class RepeatedCalls:
    """Makes calls to one broker over a connection that is replaced when it is dead."""

    def __init__(self, address: str, credentials: Credentials, on_answer: Callable[[], None]) -> None:
        """Raise ValueError for a malformed address or plaintext that was not asked for."""
        self.address, self._on_answer = address, on_answer
        self._credentials = credentials
        self._connection = Connection(address, credentials)
        self._changing = threading.Lock()
        self._closed = False
        self._complained_s = -_COMPLAIN_EVERY_S

    @property
    def connection(self) -> Connection:
        """The connection of today, for a call that is not to be repeated."""
        return self._connection

    def close(self) -> None:
        """End the channel; a call that is being held ends with CANCELLED."""
        with self._changing:
            self._closed = True
            self._connection.channel.close()

    def call(
        self,
        method: Callable[[Connection], Callable[..., T]],
        request: Any,
        deadline_s: float,
        stop: threading.Event,
        on_repeat: Callable[[], Any] = lambda: None,
    ) -> T:
        """Return the reply to a request.

        Args:
            method: the stub of the call on a connection.
            request: the same each time it is sent again.
            deadline_s: of each attempt, in seconds.
            stop: when it is set, no further attempt is made.
            on_repeat: called before each further attempt.

        Raises:
            Interrupted: `stop` was set before there was a reply.
            NotFound: the broker knows no such thing.
            Fatal: what the broker said does not change by repetition.
        """

        def on_wait(error: Exception, delay_s: float) -> None:
            metrics.RECONNECTS.inc()
            self._complain(error, delay_s)
            on_repeat()

        try:
            return retry(
                lambda: self._attempt(method, request, deadline_s),
                retryable=lambda error: _is_repeatable(error) and not stop.is_set(),
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
        except ValueError as error:
            if self._closed or connection is self._connection:
                raise
            raise _Replaced("another thread took a new connection") from error
        except grpc.RpcError as error:
            if call_status.code_of(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                connection.heard_s = time.monotonic()
            elif connection.heard_s < time.monotonic() - deadline_s / 2:
                self._replace(connection)
            raise
        connection.heard_s = time.monotonic()
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
                extra={"broker": self.address, "error": call_status.text_of(error), "delay_s": delay_s},
            )


class NotFound(Exception):
    """The broker knows no such thing."""


class _Replaced(Exception):
    """The connection was replaced before the call began."""


def _is_repeatable(error: Exception) -> bool:
    return isinstance(error, _Replaced) or call_status.is_repeatable(error)


def _final(address: str, error: Exception) -> Exception:
    if call_status.code_of(error) is grpc.StatusCode.NOT_FOUND:
        return NotFound(call_status.text_of(error))
    if call_status.is_too_large(error):
        return Fatal(
            f"a message between this actor and the broker at {address} is above the limit of "
            f"{MAX_MESSAGE_BYTES} bytes ({call_status.text_of(error)}); lower actor.unroll_length or "
            "environment.count"
        )
    return Fatal(f"the broker at {address} refuses this actor's calls: {call_status.text_of(error)}")
