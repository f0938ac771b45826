"""Redis clients of one kind: no hidden retries, explicit timeouts, bytes in and out.

redis-py would repeat a write ten times on its own; here every retry is the caller's. A URL is
`redis://`, `rediss://` or `unix:///path`.

A connection that runs scripts greets first (`scripts/greet.lua`): it closes the log of a Redis that was
restarted. No connection outlives the process that it leads to, so scripts need not look themselves.
"""

import re
from importlib.util import find_spec
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry

from penstock.broker.log.script import load
from penstock.config.redis_url import split_password
from penstock.rpc.tls_files import TlsFiles

CONNECT_TIMEOUT_S: Final = 2.0
REPLY_TIMEOUT_S: Final = 5.0
"""Longest wait for a reply; blocking reads wait less."""
MAX_CONNECTIONS: Final = 32
SCHEMES: Final = ("redis://", "rediss://", "unix://")

UNAVAILABLE: Final = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
)
"""Errors after which the same call may succeed later; the failed call may have taken effect."""
_SILENT: Final = "driver_info" if find_spec("redis.driver_info") else "lib_name"
"""Options that keep redis-py from sending its own name, which would need a permission of its own."""
_TRANSIENT_CODE: Final = re.compile(r"\b(MISCONF|LOADING|BUSY|MASTERDOWN|NOREPLICAS|OOM)\b")


def check_url(url: str) -> str:
    """Return `url` when its scheme is known; raises ValueError that names the remedy."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"redis={url[:80]!r}: start the URL with one of {', '.join(SCHEMES)}")
    return url


def without_password(url: str) -> str:
    """Return the URL without its password, for logs and messages."""
    return split_password(url)[0]


def is_unavailable(error: Exception) -> bool:
    """Return True for errors that waiting may cure, False for wrong credentials and programming errors."""
    # redis.asyncio wraps the refusal of a password in a ConnectionError.
    if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
        return False
    if isinstance(error, UNAVAILABLE):
        return True
    return isinstance(error, ResponseError) and _TRANSIENT_CODE.search(str(error)) is not None


_READ_BYTES: Final = 1024 * 1024
"""Bytes that are read from the socket at once: payloads come in MiB."""


def connect(url: str, password: str | None, tls: TlsFiles | None = None, *, greets: bool = True) -> Any:
    """Return a synchronous `redis.Redis` (typed Any: its own annotations are partial); connects on first use.

    The client is thread-safe. tls: for rediss://; read at every new connection. greets: False for one that
    only reads.
    """
    options = _options(url, password, tls) | ({"redis_connect_func": _greet} if greets else {})
    return redis.Redis.from_url(check_url(url), **options, retry=Retry(NoBackoff(), 0))


def connect_async(url: str, password: str | None, tls: TlsFiles | None = None) -> Any:
    """Return a `redis.asyncio.Redis` with a bounded pool, at whose bound callers wait; connects on first use.

    Args:
        url: `redis://`, `rediss://` or `unix:///path`.
        password: of the server, None where it asks for none.
        tls: certificates for `rediss://`; read at every new connection.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        check_url(url),
        **_options(url, password, tls),
        redis_connect_func=_greet_async,
        retry=AsyncRetry(NoBackoff(), 0),
        max_connections=MAX_CONNECTIONS,
        timeout=REPLY_TIMEOUT_S,
    )
    return redis.asyncio.Redis(connection_pool=pool)


def _greet(connection: Any) -> None:
    connection.on_connect()
    connection.send_command("EVAL", load("greet").source, 0, "")
    connection.read_response()


async def _greet_async(connection: Any) -> None:
    await connection.on_connect()
    await connection.send_command("EVAL", load("greet").source, 0, "")
    await connection.read_response()


def _options(url: str, password: str | None, tls: TlsFiles | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "decode_responses": False,
        "protocol": 2,
        "health_check_interval": 0,
        "socket_read_size": _READ_BYTES,
        _SILENT: None,
    }
    if url.startswith("rediss://"):
        options |= _tls_options(tls or TlsFiles())
    return options | ({"password": password} if password is not None else {})


def _tls_options(tls: TlsFiles) -> dict[str, Any]:
    """Return options that check the server against the authority, else the system's.

    Where we have a certificate, they show it.
    """
    files = {"ssl_ca_certs": tls.authority, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    named = {name: str(path) for name, path in files.items() if path is not None}
    return named | {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
