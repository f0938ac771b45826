"""A policy server of real parts on an address, in a thread with a loop of its own: no run, no broker."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from penstock.protocol.specification import RunSpecification
from tests.support.serving.server_parts import Stand

PATIENCE_S: Final = 60.0


class ServedStand:
    """A stand, whose calls are made in its own loop."""

    def __init__(self, stand: Stand, loop: asyncio.AbstractEventLoop) -> None:
        self.stand, self._loop = stand, loop

    def run(self, make: Callable[[Stand], Coroutine[Any, Any, Any]]) -> Any:
        """The result of what is done with the stand in its loop."""
        return asyncio.run_coroutine_threadsafe(make(self.stand), self._loop).result(PATIENCE_S)

    def publish(self, version: int) -> None:
        """The learner's newest weights."""
        self.run(lambda stand: stand.publish(version))


@contextmanager
def served_policy(made: RunSpecification, socket: Path, **serving: Any) -> Iterator[ServedStand]:
    """The stand, which answers at `unix:SOCKET` once a version is published."""
    loop, found = asyncio.new_event_loop(), dict[str, Any]()
    begun = threading.Event()

    async def serve() -> None:
        stand = found["stand"] = Stand(made, **serving)
        found["end"] = asyncio.Event()
        server = grpc.aio.server()
        stand.service().add_to(server)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        begun.set()
        await found["end"].wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield ServedStand(found["stand"], loop)
    finally:
        loop.call_soon_threadsafe(found["end"].set)
        thread.join()
        loop.close()
