"""The front of the buffer."""

from typing import Annotated, Literal

from penstock.config.sections.section import ADVANCED, NonNegative, Positive, PositiveReal, Section


class BrokerSection(Section):
    """The front of the buffer."""

    redis: str = ""
    """URL of the Redis server: redis://, rediss:// or unix://; empty: the launcher starts one.

    A password in it is kept as `security.redis_password`.
    """
    durability: Literal["memory", "fsync_1s", "fsync"] = "fsync_1s"
    """What an acknowledgement must survive; a Redis that gives less is refused."""
    declared_durability: Annotated[Literal["memory", "fsync_1s", "fsync"] | None, ADVANCED] = None
    """What the Redis server gives, where it does not let CONFIG GET be asked."""
    redis_wait_s: Annotated[Positive, ADVANCED] = 60
    """Give up when Redis does not answer for this long, in seconds."""
    drain_delay_s: Annotated[NonNegative, ADVANCED] = 0.0
    """A broker that is asked to end serves on for this long while it is not ready, in seconds.

    Balancers take it out first. 5 in Kubernetes.
    """
    session_timeout_s: Annotated[PositiveReal, ADVANCED] = 30.0
    """A session that says nothing for this long is closed, in seconds of Redis time."""
    max_log_bytes: Positive = 512 * 1024 * 1024
    """Ceiling of the payload bytes in the log."""
    max_log_entries: Positive = 1_000_000
    """Ceiling of the entries in the log."""
    max_memory_bytes: Positive = 2 * 1024 * 1024 * 1024
    """`maxmemory` of the embedded Redis server."""
    max_staged_bytes: Annotated[Positive, ADVANCED] = 256 * 1024 * 1024
    """Most payload bytes that one broker has staged and not yet appended."""
    stall_timeout_s: Annotated[Positive, ADVANCED] = 30
    """Health of a broker turns red when its event loop does not come round for this long, that of the embedded Redis when it does not answer, in seconds."""
    patched_redis: Annotated[str, ADVANCED] = ""
    """A version such as 7.0.15 whose vendor has fixed the known remote code executions without a new number.

    It is then used over TCP too.
    """
    max_calls_per_s: Annotated[PositiveReal, ADVANCED] = 2000.0
    """Calls that one named caller, or one connection of others, may make in a second."""
    max_bytes_per_s: Annotated[PositiveReal, ADVANCED] = 1024.0 * 1024 * 1024
    """Bytes that it may send and fetch in a second."""
    max_concurrent_calls: Annotated[Positive, ADVANCED] = 8192
    """Calls in hand at once, held ones included; every actor holds one."""
    max_connections: Annotated[Positive, ADVANCED] = 4096
    """Connections at once; more are closed."""
    max_connection_age_s: Annotated[PositiveReal, ADVANCED] = 900.0
    """A connection is asked to come again after this long, in seconds, give or take a tenth."""
