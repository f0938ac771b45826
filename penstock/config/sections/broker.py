"""The front of the buffer."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.sections.section import ADVANCED, MOST, NonNegative, Positive, PositiveReal, Section


class BrokerSection(Section):
    """The front of the buffer."""

    redis: str = ""
    """URL of Redis: redis://, rediss:// or unix://, its password kept aside; empty: that of the launcher."""
    durability: Literal["memory", "fsync_1s", "fsync"] = "fsync_1s"
    """What an acknowledgement must survive; a Redis that gives less is refused."""
    declared_durability: Annotated[Literal["memory", "fsync_1s", "fsync"] | None, ADVANCED] = None
    """What the Redis server gives, where it does not let CONFIG GET be asked."""
    redis_wait_s: Annotated[Positive, ADVANCED] = 60
    """Give up when Redis does not answer for this long, in seconds."""
    drain_delay_s: Annotated[NonNegative, ADVANCED] = 0.0
    """Time that an ending broker serves on while it is not ready, in seconds; 5 in Kubernetes."""
    session_timeout_s: Annotated[PositiveReal, ADVANCED] = 30.0
    """A session that says nothing for this long is closed, in seconds of Redis time."""
    max_reward: PositiveReal = 1e6
    """Fragments with a |reward| of a step above this are refused, in units of the reward."""
    max_log_prob: Annotated[PositiveReal, ADVANCED] = 1e4
    """Fragments with a |log-probability| of a step above this are refused, in nats."""
    max_log_bytes: Positive = 512 * 1024 * 1024
    """Ceiling of the bytes that the log's entries take in Redis, headers and overhead included."""
    max_log_entries: Positive = 1_000_000
    """Ceiling of the entries in the log."""
    max_memory_bytes: Positive = 2 * 1024 * 1024 * 1024
    """`maxmemory` of the embedded Redis server."""
    max_staged_bytes: Annotated[Positive, ADVANCED] = 256 * 1024 * 1024
    """Most payload bytes that one broker has staged and not yet appended."""
    stall_timeout_s: Annotated[Positive, ADVANCED] = 30
    """Health turns red when the event loop or the embedded Redis hangs for this long, in seconds."""
    patched_redis: Annotated[str, ADVANCED] = ""
    """A version such as 7.0.15 that the vendor has fixed under its old number; it may be used over TCP."""
    max_calls_per_s: Annotated[PositiveReal, ADVANCED] = 2000.0
    """Calls that one named caller, or one connection of others, may make in a second."""
    max_bytes_per_s: Annotated[float, Field(gt=0.0, le=MOST), ADVANCED] = 1024.0 * 1024 * 1024
    """Bytes that it may send and fetch in a second."""
    max_concurrent_calls: Annotated[Positive, ADVANCED] = 8192
    """Calls in hand at once, held ones included; every actor holds one."""
    max_connections: Annotated[Positive, ADVANCED] = 4096
    """Connections at once; more are closed."""
    max_connection_age_s: Annotated[PositiveReal, ADVANCED] = 900.0
    """A connection is asked to come again after this long, in seconds, give or take a tenth."""
