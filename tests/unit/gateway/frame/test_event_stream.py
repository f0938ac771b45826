"""A stream of events ends with its server, and says so where it was not whole."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the gateway needs its extra")

from penstock.gateway.frame.event_stream import ENDING, EventStream


class Listener:
    """Who reads a stream at a server that can be ended."""

    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self.heard = list[bytes]()
        self.is_over = False
        self.first = asyncio.Event()

    async def read(self, stream: EventStream) -> None:
        """Read until it ends."""
        scope = {"type": "http", "state": {ENDING: self.ending}}
        await stream(scope, self._stay, self._hear)

    async def _stay(self) -> Any:
        await asyncio.Event().wait()

    async def _hear(self, message: Any) -> None:
        if body := message.get("body"):
            self.heard.append(body)
            self.first.set()
        self.is_over |= message.get("more_body") is False


async def test_one_without_an_end_ends_with_its_server() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            closed.set()

    listener = Listener()
    reading = asyncio.ensure_future(listener.read(EventStream(endless())))
    await listener.first.wait()
    listener.ending.set()
    await reading
    assert (listener.heard, listener.is_over, closed.is_set()) == ([b"first"], True, True)


@pytest.mark.parametrize("grace_s", [0.0, 1000.0])
async def test_an_answer_goes_on_for_a_while(grace_s: float) -> None:
    goes_on = asyncio.Event()

    async def answer() -> AsyncIterator[str]:
        yield "a word"
        await goes_on.wait()
        yield ", and another"

    listener = Listener()
    stream = EventStream(answer(), grace_s=grace_s, cut_off="!")
    reading = asyncio.ensure_future(listener.read(stream))
    await listener.first.wait()
    listener.ending.set()
    if grace_s:
        await asyncio.sleep(0)
        goes_on.set()
    await reading
    assert listener.heard == [b"a word", b", and another" if grace_s else b"!"]
    assert listener.is_over


async def test_what_fails_in_time_fails_as_ever() -> None:
    async def late() -> AsyncIterator[str]:
        yield "first"
        raise TimeoutError("of its own")

    with pytest.raises(BaseException) as raised:
        await Listener().read(EventStream(late()))
    assert "of its own" in str(raised.value)
