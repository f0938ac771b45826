"""Client channels, all with the same options.

No retries inside gRPC (the outbox is the one retry layer), keep-alive below the server's ban,
reconnects at most 2 s apart, the message limits of `wire.limits`.
"""

from functools import partial
from typing import Any, Final

import grpc

from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.rpc.address import check_address, is_local
from penstock.rpc.auth import Credentials
from penstock.rpc.rotating_channel import RotatingChannel

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
    """Return a channel to HOST:PORT or unix:/path.

    It connects when first used, and follows TLS files that are replaced.

    Raises ValueError for a malformed address or plaintext that was not asked for.
    """
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
    """No proxy of the environment for this machine: it would be sent in plaintext what is for loopback."""
    return (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_local(address) else CHANNEL_OPTIONS


def _secure(address: str, credentials: Credentials) -> grpc.Channel:
    tls = credentials.for_channel(address)
    if tls is None:
        raise ValueError(f"address={address!r}: credentials that were renewed have no TLS files any more")
    return grpc.secure_channel(address, tls, options=_options(address))
