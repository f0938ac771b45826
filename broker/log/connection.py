"""Redis clients of one kind: no hidden retries, explicit timeouts, bytes in and out.

redis-py would repeat a write ten times on its own; here every retry is the caller's. A URL is
`redis://`, `rediss://` or `unix:///path`.

A connection that runs scripts greets first (`scripts/greet.lua`): it closes the log of a Redis that was
restarted. No connection outlives the process that it leads to, so scripts need not look themselves.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis import asyncio as redis_asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from penstock.broker.log import script
from penstock.broker.log.script import load
from penstock.config.settings import BrokerSection
from penstock.config.url_secrets import split_password
from penstock.protocol.limits import MIB
from penstock.protocol.messages import Durability
from penstock.rpc.identity import TlsFiles

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
"""The option that keeps redis-py from sending its own name, which would need a further permission."""
_TRANSIENT_CODE: Final = re.compile(r"\b(MISCONF|LOADING|BUSY|MASTERDOWN|NOREPLICAS|OOM)\b")


def check_url(url: str) -> str:
    """Return `url` when its scheme is known; raises ValueError that names the remedy."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"redis={url[:80]!r}: start the URL with one of {', '.join(SCHEMES)}")
    return url


def without_password(url: str) -> str:
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
    """Return a `redis.asyncio.Redis` that connects on first use; callers wait at the bound of its pool."""
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
    """Check the server against the authority, else the system's; show a certificate where we have one."""
    files = {"ssl_ca_certs": tls.authority, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    named = {name: str(path) for name, path in files.items() if path is not None}
    return named | {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


Item = TypeVar("Item")


def grouped(
    items: Iterable[Item], sizes: Iterable[int], most_bytes: int, most_items: int
) -> Iterator[list[Item]]:
    """Yield the items in order, in groups whose payloads of `sizes` bytes one reply of Redis may hold."""
    group: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if group and (total + size > most_bytes or len(group) == most_items):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


# ---- Decide whether a Redis server may hold a run, and refuse one that could forget what was acknowledged.

Version = tuple[int, ...]

FUNCTIONAL_FLOOR: Final[Version] = (6, 2)
SECURITY_FLOORS: Final[dict[Version, Version]] = {
    (6, 2): (6, 2, 20),
    (7, 2): (7, 2, 11),
    (7, 4): (7, 4, 6),
    (8, 0): (8, 0, 4),
    (8, 2): (8, 2, 2),
    (8, 4): (8, 4, 0),
    (8, 6): (8, 6, 3),
}
"""First release of each series without the known remote code executions (CVE-2025-49844 and its
companions in Lua; CVE-2026-23479 from 8.6 on). An older series that is not named has no such release."""
REPLAYS_WITH_RIGHTS: Final[Version] = (7, 0)
"""From here on a server that starts replays each transaction of its append-only file, such as the writes of
a script, with the rights of the user `default`, and leaves out what it may not do (redis/redis#14541)."""
READ_BYTES: Final = 16 * MIB
"""What Redis holds of payloads while one learner process reads them: its largest reply."""
HEADROOM_BYTES: Final = 64 * MIB


_NEVER_REPLAYED: Final = frozenset({"-@dangerous", "-@admin", "-@blocking", "-@connection", "-@pubsub", ""})
"""ACL rules of commands that no append-only file of a run contains."""
_REPLAY_REMEDY: Final = (
    "have its ACL say `user default off resetpass ~* &* +@all`, as deploy/redis/users.acl does: because it "
    "is off, callers cannot be it"
)


class UnsuitableRedis(ValueError):
    """Refuses a server that must not be used; the message names the setting, its value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Describes a server that the guard has accepted."""

    version: str
    durability: Durability
    max_memory_bytes: int
    """Redis's `maxmemory`; 0 without a limit."""
    warnings: tuple[str, ...] = ()
    cannot_persist: bool = False
    """The server refuses writes because the last one to its append-only file failed."""
    cannot_rewrite: bool = False
    """The last rewrite of its append-only file failed: the file grows."""
    used_memory_bytes: int = 0
    clients: int = 0
    operations_per_second: int = 0


Examine = Callable[[], Awaitable[ServerFacts]]


async def examine(redis: "redis_asyncio.Redis", url: str, section: BrokerSection) -> ServerFacts:
    """Return the facts of a suitable server; raises UnsuitableRedis for another, RedisError while it is down.

    A server that is still loading its append-only file reports that it has none, so that its facts are not
    read before it has finished (BusyLoadingError). url: its scheme says whether the security floor applies.
    """
    info: dict[str, Any] = await redis.info()
    if int(info.get("loading", 0)):
        raise BusyLoadingError("Redis is loading its append-only file")
    version = str(info["redis_version"])
    trusted = is_private(url) or version == section.patched_redis
    warnings = [check_version(version, private=trusted)]
    check_role(info)
    check_eviction(info)
    await _check_commands(redis)
    memory = check_memory(info, section)
    durability = await _durability(redis, info, section)
    check_durability(durability, Durability[section.durability.upper()])
    if durability is not Durability.MEMORY:
        warnings.append(await _replay_rights(redis, parse_version(version)))
    return ServerFacts(
        version=str(info["redis_version"]),
        durability=durability,
        max_memory_bytes=memory,
        warnings=tuple(filter(None, warnings)),
        cannot_persist=info.get("aof_last_write_status", "ok") != "ok",
        cannot_rewrite=info.get("aof_last_bgrewrite_status", "ok") != "ok",
        used_memory_bytes=int(info.get("used_memory", 0)),
        clients=int(info.get("connected_clients", 0)),
        operations_per_second=int(info.get("instantaneous_ops_per_sec", 0)),
    )


def is_private(url: str) -> bool:
    return urlsplit(url).scheme == "unix"


def parse_version(text: str) -> Version:
    """Return the numbers of a version such as "7.0.15"; raises UnsuitableRedis for any other text."""
    try:
        return tuple(int(part) for part in text.split(".")[:3])
    except ValueError:
        raise UnsuitableRedis(f"redis_version={text!r} is not a version; use Redis 6.2 or newer") from None


def check_version(text: str, *, private: bool) -> str:
    """Return a warning or ""; raises UnsuitableRedis below the functional or, by TCP, the security floor."""
    version = parse_version(text)
    if version < FUNCTIONAL_FLOOR:
        raise UnsuitableRedis(f"redis_version={text} is below 6.2; install Redis 6.2 or newer")
    floor = security_floor(version)
    if floor is not None and version >= floor:
        return ""
    remedy = f"upgrade to {'.'.join(map(str, floor))}" if floor else "use a series with a fixed release"
    fault = f"redis_version={text} has known remote code executions: {remedy}"
    if not private:
        raise UnsuitableRedis(
            f"{fault}, reach this server by a unix socket, or, where its vendor has fixed them without a "
            f"new number, set broker.patched_redis = {text!r}"
        )
    return fault


def security_floor(version: Version) -> Version | None:
    """Return the first safe release of the version's series, None where the series has none."""
    series = version[:2]
    if series in SECURITY_FLOORS:
        return SECURITY_FLOORS[series]
    return (*series, 0) if series > max(SECURITY_FLOORS) else None


def check_role(info: dict[str, Any]) -> None:
    """Raise UnsuitableRedis for a replica or a cluster: neither can keep the promises."""
    if info.get("role", "master") != "master":
        raise UnsuitableRedis(f"role={info['role']}: a replica refuses writes; give the primary's URL")
    if int(info.get("cluster_enabled", 0)):
        raise UnsuitableRedis(
            "cluster_enabled=1: a run lives in one server; give a server without cluster mode"
        )


def check_eviction(info: dict[str, Any]) -> None:
    """Raise UnsuitableRedis unless the server keeps every key."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UnsuitableRedis(
            f"maxmemory_policy={policy}: this server may evict acknowledged experience; "
            "set maxmemory-policy noeviction"
        )


def check_memory(info: dict[str, Any], section: BrokerSection) -> int:
    """Return `maxmemory` in bytes; raises UnsuitableRedis where the ceilings do not fit below it."""
    limit = int(info.get("maxmemory", 0))
    needed = section.max_log_bytes + section.max_staged_bytes + READ_BYTES + HEADROOM_BYTES
    if limit and limit < needed:
        raise UnsuitableRedis(
            f"maxmemory={limit}: {needed} bytes are needed (broker.max_log_bytes={section.max_log_bytes} + "
            f"broker.max_staged_bytes={section.max_staged_bytes} + {READ_BYTES} + {HEADROOM_BYTES}); raise "
            "maxmemory or "
            "lower the ceilings"
        )
    return limit


async def _check_commands(redis: "redis_asyncio.Redis") -> None:
    """Raise UnsuitableRedis where a command has another name: a script that meets it stops half done.

    A server that refuses to list its commands passes.
    """
    client: Any = redis
    named = ("EVALSHA", *script.commands())
    try:
        answers = await client.execute_command("COMMAND INFO", *named)
    except ResponseError:
        return
    absent = [name for name, answer in zip(named, answers, strict=True) if answer is None]
    if absent:
        raise UnsuitableRedis(
            f"rename-command: this server knows no {', '.join(absent)}, which the log calls; "
            "give them their own names back"
        )


async def _durability(
    redis: "redis_asyncio.Redis", info: dict[str, Any], section: BrokerSection
) -> Durability:
    if not int(info.get("aof_enabled", 0)):
        return Durability.MEMORY
    try:
        # A pattern: before 7.0 CONFIG GET takes one argument.
        answer = await redis.config_get("*appendfsync*")
    except ResponseError as error:
        return _declared(section, str(error))
    config = {_text(name): _text(value) for name, value in answer.items()}
    if "appendfsync" not in config:
        return _declared(section, "CONFIG GET appendfsync is empty")
    return durability_of(config)


async def _replay_rights(redis: "redis_asyncio.Redis", version: Version) -> str:
    try:
        user: Any = await redis.acl_getuser("default")
    except ResponseError as error:
        return (
            f"the rights of Redis's user default are not known ({error}): where it may not run every "
            f"command, a restart of the server loses acknowledged data; {_REPLAY_REMEDY}"
        )
    if version >= REPLAYS_WITH_RIGHTS:
        check_replay_rights([*user["categories"], *user["commands"]], [_text(key) for key in user["keys"]])
    return ""


def check_replay_rights(commands: Sequence[str], keys: Sequence[str]) -> None:
    """Raise UnsuitableRedis where these ACL rules of `default`, such as +@all, lose writes at a restart."""
    taken = {rule for rule in commands if rule.startswith("-")} - _NEVER_REPLAYED
    if "+@all" not in commands or taken or "~*" not in keys:
        rights = " ".join([*keys, *commands]).strip() or "none"
        raise UnsuitableRedis(
            f"user default: its rights ({rights}) are less than every command on every key, so that a "
            f"restart of this server would lose acknowledged data; {_REPLAY_REMEDY}"
        )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def durability_of(config: dict[str, str]) -> Durability:
    if config["appendfsync"] == "no":
        return Durability.MEMORY
    if config["appendfsync"] == "everysec" or config.get("no-appendfsync-on-rewrite") == "yes":
        return Durability.FSYNC_1S
    return Durability.FSYNC


def _declared(section: BrokerSection, why: str) -> Durability:
    if section.declared_durability is None:
        raise UnsuitableRedis(
            f"broker.declared_durability is not set and the server does not tell its fsync level ({why}); "
            "set it to what the server gives: memory, fsync_1s or fsync"
        )
    return Durability[section.declared_durability.upper()]


def check_durability(given: Durability, asked: Durability) -> None:
    """Raise UnsuitableRedis when the server gives less than `broker.durability` asks."""
    if given < asked:
        needed = {Durability.FSYNC_1S: "everysec", Durability.FSYNC: "always"}[asked]
        raise UnsuitableRedis(
            f"broker.durability={asked.label}: this server gives {given.label}; "
            f"set appendonly yes and appendfsync {needed}, or ask for durability {given.label}"
        )
