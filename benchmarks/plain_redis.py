"""The yardstick of the experience path: redis-py XADD in one process and XREAD in another.

`python -m benchmarks.plain_redis URL COUNT SIZE` is the writing process.
"""

import os
import subprocess
import sys
from typing import Any

import redis

from benchmarks.rate import Rate, touch

STREAM = "plain"
READ_COUNT = 16


def measure(url: str, *, count: int, size: int) -> Rate:
    """MB/s of `count` entries of `size` bytes from process to process."""
    client = redis.Redis.from_url(url, protocol=2)
    writer = subprocess.Popen([sys.executable, "-m", __spec__.name, url, str(count), str(size)])
    rate, last = Rate(), b"0"
    while rate.entries < count:
        reply: Any = client.xread({STREAM: last}, count=READ_COUNT, block=30_000)
        if not reply:
            raise RuntimeError(f"the writer stopped after {rate.entries} of {count} entries")
        entries = reply[0][1]
        for _, fields in entries:
            touch(fields[b"p"])
        last = entries[-1][0]
        rate.add(len(entries), size * len(entries))
    writer.wait()
    client.delete(STREAM)
    client.close()
    return rate


def write(url: str, count: int, size: int) -> None:
    """Append `count` entries, one call each."""
    client, payload = redis.Redis.from_url(url), os.urandom(size)
    for _ in range(count):
        client.xadd(STREAM, {"p": payload})


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
