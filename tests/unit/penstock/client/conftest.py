"""A scripted CartPole server and both clients of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.client import AsyncPolicyClient, PolicyClient
from penstock.client.synchronous import Episode
from tests.support.serving.scripted_server import ScriptedPolicy, ScriptedServer, serving


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving() as scripted:
        yield scripted


@pytest.fixture
def policy(server: ScriptedServer) -> ScriptedPolicy:
    return server.policy


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[AsyncPolicyClient]:
    """With a deadline that a test can wait for."""
    async with AsyncPolicyClient(server.address, deadline_s=2.0) as connected:
        yield connected


class Threaded:
    """A client without an event loop, or an episode of it, whose calls wait on a thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if not callable(found := getattr(self._inner, name)):
            return found

        async def call(*arguments: Any, **options: Any) -> Any:
            result = await asyncio.to_thread(found, *arguments, **options)
            return Threaded(result) if isinstance(result, Episode) else result

        return call


@pytest.fixture(params=["threads", "event loop"])
async def either(request: pytest.FixtureRequest, server: ScriptedServer) -> AsyncIterator[Any]:
    """Each of the two clients, called as one of an event loop."""
    is_threaded = request.param == "threads"
    made: Any = Threaded(PolicyClient(server.address)) if is_threaded else AsyncPolicyClient(server.address)
    yield made
    await made.close()
