"""What surrounds every request: how many large bodies are in memory at a time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the gateway needs its extra")

from gateway.frame.envelope import Doors, Envelope
from gateway.frame.server_end import ENDING

DOORS = Doors(max_body_bytes=10, large_at_once=1)
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/api/feedback",
    "headers": [(b"host", b"127.0.0.1")],
    "client": ("127.0.0.1", 1),
}


async def application(_scope: Any, receive: Any, send: Any) -> None:
    """Read a whole body, and answer."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def answered(envelope: Envelope, parts: AsyncIterator[bytes]) -> int:
    """The status of the answer to a body that comes in parts."""
    found: list[int] = []

    async def receive() -> dict[str, Any]:
        part = await anext(parts, b"")
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    async def send(message: Any) -> None:
        found.extend([message["status"]] if message["type"] == "http.response.start" else [])

    await envelope(dict(SCOPE), receive, send)
    return found[0]


async def of(*parts: bytes) -> AsyncIterator[bytes]:
    """A body that is there."""
    for part in parts:
        yield part


async def test_one_large_body_too_many_is_asked_to_come_again() -> None:
    """Small ones pass; the next large one does, too, once the one before it is over or has been given up."""
    envelope = Envelope(application, DOORS, lambda _: None)
    half, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield 11 * b"x"
        half.set()
        await rest.wait()
        yield 11 * b"x"

    first = asyncio.create_task(answered(envelope, slow()))
    await half.wait()
    assert await answered(envelope, of(6 * b"x", 6 * b"x")) == 429
    assert await answered(envelope, of(10 * b"x")) == 201
    rest.set()
    assert await first == 201
    assert await answered(envelope, of(6 * b"x", 6 * b"x")) == 201
    half.clear()
    rest.clear()
    first = asyncio.create_task(answered(envelope, slow()))
    await half.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await answered(envelope, of(11 * b"x")) == 201


@pytest.mark.parametrize("ends", [True, False])
async def test_who_still_waits_when_the_server_ends_is_told(ends: bool) -> None:
    """In place of a cancellation that the server would log as a defect; any other goes on."""
    waits, ending = asyncio.Event(), asyncio.Event()
    sent = list[Any]()

    async def long(_scope: Any, _receive: Any, _send: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    envelope = Envelope(long, DOORS, lambda _: None)
    task = asyncio.ensure_future(envelope({**SCOPE, "state": {ENDING: ending}}, receive, send))
    await waits.wait()
    if ends:
        ending.set()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (not ends)
    assert [one["status"] for one in sent if "status" in one] == [503] * ends
