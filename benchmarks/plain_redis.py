"""The yardstick of the experience path: redis-py XADD in one process and XREAD in another.

`python -m benchmarks.plain_redis URL COUNT SIZE PACKER` is the writing process. redis-py writes commands with
either of two packers: hiredis copies a payload into the command, the one in Python sends it beside it. Which
one is faster depends on the size.
"""

import os
import sys
from typing import Any, Final

import redis
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer

from benchmarks.child import child
from benchmarks.rate import touch
from benchmarks.services import Services
from benchmarks.transfer import Transfer

STREAM: Final = "plain"
READ_COUNT: Final = 16
HIREDIS, PYTHON = "hiredis", "python"
PACKERS: Final = (HIREDIS, PYTHON)
_PATIENCE_S: Final = 60.0
_BUFFER_CUTOFF: Final = 6000
"""Bytes from which redis-py does not copy an argument into the command."""


def measure(here: Services, *, count: int, size: int, packer: str = HIREDIS) -> Transfer:
    """Send `count` entries of `size` bytes from process to process."""
    client = redis.Redis.from_url(here.redis_url, protocol=2, socket_timeout=_PATIENCE_S)
    command = ["-m", __spec__.name, here.redis_url, str(count), str(size), packer]
    with child(command) as writer:
        pids = {"sender": writer.pid, "Redis": redis_pid(here), "reader": os.getpid()}
        transfer, last = Transfer(processes=pids), b"0"
        while transfer.entries < count:
            reply: Any = client.xread({STREAM: last}, count=READ_COUNT, block=30_000)
            if not reply:
                raise RuntimeError(f"the writer stopped after {transfer.entries} of {count} entries")
            entries = reply[0][1]
            for _, fields in entries:
                touch(fields[b"p"])
            last = entries[-1][0]
            transfer.add(len(entries), size * len(entries))
        transfer.finish()
    client.delete(STREAM)
    client.close()
    return transfer


def redis_pid(here: Services) -> int:
    """Return the server's own pid; the service that guards it has another."""
    pid = here.endpoint("redis").server_pid
    assert pid is not None
    return pid


def write(url: str, count: int, size: int, packer: str) -> None:
    """Append `count` entries, one call each."""
    encoder = Encoder("utf-8", "strict", decode_responses=False)  # type: ignore[no-untyped-call]
    in_python = PythonRespSerializer(_BUFFER_CUTOFF, encoder.encode)
    chosen: dict[str, Any] = {"command_packer": in_python} if packer == PYTHON else {}
    chosen |= {"socket_timeout": _PATIENCE_S}
    client, payload = redis.Redis.from_url(url, protocol=2, **chosen), os.urandom(size)
    for _ in range(count):
        client.xadd(STREAM, {"p": payload})


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
