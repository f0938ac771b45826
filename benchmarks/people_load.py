"""People at a gateway, as a process of their own: streams that say little, and requests at a fixed rate.

    python -m benchmarks.people_load ADDRESS --seconds 20 [--rate 100] [--streams 1000] < ASKED

ASKED: a line of JSON, {"requests": [[method, path, headers, body], ...], "streams": [[path, headers], ...]}.
Requests are sent at their time whether those before were answered or not, over connections that stay open; a
latency counts from that time. Streams are opened before, and read. It writes a line when they are open, and
one with the figures; between the two it waits for a line.
"""

import argparse
import asyncio
import json
import sys
from typing import Any, Final

from benchmarks.serving_load import summary

MOST_LINES: Final = 64
"""Connections that requests share."""
OPENED_AT_ONCE: Final = 20
OPEN_PAUSE_S: Final = 0.2
"""Twenty streams in this time: a gateway takes 200 calls of an address in a second."""


def encoded(address: str, method: str, path: str, headers: dict[str, str], body: str) -> bytes:
    """Return a request as it is sent."""
    given = {"Host": address, "Content-Length": str(len(body.encode())), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n{body}".encode()


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def stream(address: str, request: bytes, is_open: asyncio.Semaphore) -> None:
    """Read a stream until it is cancelled; raises RuntimeError for one that ends."""
    reader, writer = await opened(address)
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"refused: {head!r}")
    await reader.readuntil(b"event: jobs\n")
    is_open.release()
    while await reader.read(1 << 16):
        pass
    raise RuntimeError("a stream has ended")


class Lines:
    """Connections that are used by one request at a time; a new one where all are busy."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._room = asyncio.Semaphore(MOST_LINES)

    async def call(self, request: bytes) -> None:
        """Send a request and read its answer; raises RuntimeError for one that is no success."""
        async with self._room:
            line = await self._line()
            reader, writer = line
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length))
            if not head.startswith(b"HTTP/1.1 20"):
                raise RuntimeError(f"refused: {head!r} {body!r}")
            self._free.append(line)

    async def _line(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection that is open: a server closes those that are idle for some seconds."""
        while self._free:
            reader, writer = self._free.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await opened(self._address)


async def at_a_rate(address: str, requests: list[bytes], rate: float, seconds: float) -> list[float]:
    """Return the latency of each request from the time that it was due, in seconds."""
    loop, lines = asyncio.get_running_loop(), Lines(address)
    begin_s = loop.time() + 0.1

    async def one(number: int) -> float:
        due_s = begin_s + number / rate
        await asyncio.sleep(due_s - loop.time())
        await lines.call(requests[number % len(requests)])
        return loop.time() - due_s

    return list(await asyncio.gather(*(one(number) for number in range(int(rate * seconds)))))


async def all_open(listening: list[asyncio.Task[None]], is_open: asyncio.Semaphore) -> None:
    """Wait until all streams are open; raises RuntimeError for one that is refused."""

    async def count() -> None:
        for _ in listening:
            await is_open.acquire()

    counting = asyncio.create_task(count())
    done, _ = await asyncio.wait({counting, *listening}, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


async def measure(said: argparse.Namespace, asked: dict[str, Any]) -> None:
    """Open the streams, say so, wait for a word, and measure."""
    is_open, listening = asyncio.Semaphore(0), list[asyncio.Task[None]]()
    for number in range(said.streams):
        path, headers = asked["streams"][number % len(asked["streams"])]
        request = encoded(said.address, "GET", path, headers, "")
        listening.append(asyncio.create_task(stream(said.address, request, is_open)))
        if number % OPENED_AT_ONCE == OPENED_AT_ONCE - 1:
            await asyncio.sleep(OPEN_PAUSE_S)
    await all_open(listening, is_open)
    print(json.dumps({"open": len(listening)}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    requests = [encoded(said.address, *one) for one in asked["requests"]]
    latencies = await at_a_rate(said.address, requests, said.rate, said.seconds)
    ended = [one for one in listening if one.done()]
    if ended:
        ended[0].result()
    print(json.dumps(summary(latencies, said.seconds) | {"calls": len(latencies)}), flush=True)
    for one in listening:
        one.cancel()


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.people_load")
    parser.add_argument("address")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=0)
    said = parser.parse_args()
    asyncio.run(measure(said, json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
