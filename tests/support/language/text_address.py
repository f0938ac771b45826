"""A server of text on an address, in a thread with a loop of its own, and the agents' API before it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from penstock.client.text_calls import DEADLINE_S, HttpReply, HttpRequest
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.text_api import DESCRIBE_S, FIRST, Agents
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import REACH_S, RunAddresses, ServedText, Upstream
from penstock.rpc.auth import Credentials
from tests.support.language.text_stand import TextStand

PATIENCE_S = 60.0


@contextmanager
def served_text(base: Path, socket: Path, **serving: Any) -> Iterator[TextStand]:
    """The stand, whose service answers at `unix:SOCKET`; version 1 is published."""
    loop, made = asyncio.new_event_loop(), dict[str, Any]()
    begun, over = threading.Event(), threading.Event()

    async def serve() -> None:
        stand = made["stand"] = TextStand(base, **serving)
        made["end"] = asyncio.Event()
        engine = threading.Thread(target=stand.engine.run, args=(over.is_set,), daemon=True)
        engine.start()
        server = grpc.aio.server()
        stand.service.add_to(server)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        await stand.publish(1)
        begun.set()
        await made["end"].wait()
        await server.stop(0)
        over.set()
        engine.join()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield made["stand"]
    finally:
        loop.call_soon_threadsafe(made["end"].set)
        thread.join()
        loop.close()


@contextmanager
def agents_api(socket: Path, deadline_s: float = DEADLINE_S) -> Iterator[str]:
    """The address of the agents' API over that server, as `base_url` of a client."""
    with agents_api_of(f"unix:{socket}", deadline_s) as base_url:
        yield base_url


@contextmanager
def agents_api_of(address: str, deadline_s: float = DEADLINE_S) -> Iterator[str]:
    """The same over a server at any address."""
    with agents_api_over({FIRST: address}, deadline_s) as base_url:
        yield base_url


@contextmanager
def agents_api_over(
    addresses: Mapping[str, str],
    deadline_s: float = DEADLINE_S,
    reach_s: float = REACH_S,
    describe_s: float = DESCRIBE_S,
) -> Iterator[str]:
    """The same over several servers, by the names of agents."""
    served = {
        name: ServedText(upstream_at(address), deadline_s=deadline_s, reach_s=reach_s)
        for name, address in addresses.items()
    }
    server = HttpServer(make_app(text_listener(Agents(served, describe_s).answer)), "127.0.0.1:0")
    server.start()
    try:
        yield f"{server.url}/v1"
    finally:
        server.stop()


def upstream_at(address: str) -> Upstream:
    """A run of which the address of its server of text is known, and nothing else."""
    return Upstream(addresses=lambda: RunAddresses(server=address), credentials=Credentials())


def relay_to(upstream: Upstream) -> Callable[[HttpRequest], Awaitable[HttpReply]]:
    """What a gateway answers before the server of one run."""
    return Agents({FIRST: ServedText(upstream)}).answer
