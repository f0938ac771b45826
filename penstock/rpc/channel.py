"""Client channels, all with the same options: no retries inside gRPC, keep-alive below the server's ban."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self

import grpc

from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.rpc.address import check_address, is_local
from penstock.rpc.auth import Credentials

# ---- A client channel that follows its TLS files: gRPC channels keep their certificate for life.

log = logging.getLogger(__name__)


class _Generation:
    """One underlying channel and the calls that are on it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.is_retired = False


class RotatingChannel(grpc.Channel):
    """Is a channel that follows its TLS files. `build` makes a channel with the given credentials."""

    def __init__(self, build: Callable[[Credentials], grpc.Channel], credentials: Credentials) -> None:
        self._build = build
        self._credentials = credentials
        self._lock = threading.Lock()
        self._current = _Generation(build(credentials))
        self._retired: set[_Generation] = set()

    def begin(self) -> _Generation:
        """The channel for one more call; give it back with `end`."""
        with self._lock:
            fresh = self._credentials.renewed()
            retired = self._replace(fresh) if fresh is not None else None
            generation = self._current
            generation.calls += 1
        if retired is not None:
            retired.channel.close()
        return generation

    def end(self, generation: _Generation) -> None:
        with self._lock:
            generation.calls -= 1
            is_over = generation.is_retired and generation.calls == 0
            if is_over:
                self._retired.discard(generation)
        if is_over:
            generation.channel.close()

    def _replace(self, fresh: Credentials) -> _Generation | None:
        """Take the new credentials; the old channel when no call uses it."""
        log.info("TLS files were replaced: connecting anew")
        old, self._credentials = self._current, fresh
        self._current = _Generation(self._build(fresh))
        old.is_retired = True
        if old.calls == 0:
            return old
        self._retired.add(old)
        return None

    def subscribe(self, callback: Any, try_to_connect: Any = False) -> None:
        self._current.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._current.channel.unsubscribe(callback)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Unary(self, lambda channel: channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a streaming method; a stream keeps the channel on which it began."""
        return _Stream(self, lambda channel: channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Unary(self, lambda channel: channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Stream(self, lambda channel: channel.stream_stream(*arguments, **options))

    def close(self) -> None:
        with self._lock:
            generations = [self._current, *self._retired]
            self._retired.clear()
        for generation in generations:
            generation.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Stream:
    """A method of the stub with a stream of replies: bound to a channel at each call, once per channel."""

    def __init__(self, owner: RotatingChannel, bind: Callable[[grpc.Channel], Any]) -> None:
        self._owner, self._bind = owner, bind
        self._bound: tuple[_Generation, Any] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._begun(lambda bound: bound(*arguments, **options))

    def _on(self, generation: _Generation) -> Any:
        bound = self._bound
        if bound is None or bound[0] is not generation:
            bound = self._bound = (generation, self._bind(generation.channel))
        return bound[1]

    def _begun(self, begin: Callable[[Any], Any]) -> Any:
        """Return the call that `begin` starts, which gives its channel back when it has ended."""
        owner, generation = self._owner, self._owner.begin()
        try:
            call = begin(self._on(generation))
            if not call.add_callback(lambda: owner.end(generation)):
                owner.end(generation)
        except BaseException:
            owner.end(generation)
            raise
        return call


class _Unary(_Stream):
    """A method of the stub with one reply, waited for or as a future."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        generation = self._owner.begin()
        try:
            return self._on(generation)(*arguments, **options)
        finally:
            self._owner.end(generation)

    def future(self, *arguments: Any, **options: Any) -> Any:
        return self._begun(lambda bound: bound.future(*arguments, **options))


CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name also the time that a connection may take until it is usable. A busy broker needs some
    # for each of many; with less they give up and come again, each more than once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Channels of one process would otherwise share a connection with its back-off state.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    tls = credentials.for_channel(check_address(address))
    if tls is None:
        return grpc.insecure_channel(address, options=_options(address))
    return RotatingChannel(partial(_secure, address), credentials)


def open_async_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """Return a channel as `open_channel` does, for an event loop; it keeps its certificate for life."""
    tls = credentials.for_channel(check_address(address))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_options(address))
    return grpc.aio.secure_channel(address, tls, options=_options(address))


def _options(address: str) -> tuple[tuple[str, Any], ...]:
    """Return channel options: no proxy of the environment gets what is sent to this machine."""
    return (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_local(address) else CHANNEL_OPTIONS


def _secure(address: str, credentials: Credentials) -> grpc.Channel:
    tls = credentials.for_channel(address)
    if tls is None:
        raise ValueError(f"address={address!r}: credentials that were renewed have no TLS files any more")
    return grpc.secure_channel(address, tls, options=_options(address))
