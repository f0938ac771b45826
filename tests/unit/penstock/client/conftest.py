"""A scripted CartPole server and both clients of it."""

from collections.abc import AsyncIterator

import pytest

from penstock.client import AsyncPolicyClient
from tests.support.serving.scripted_server import ScriptedPolicy, ScriptedServer, serving


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """With the spaces of CartPole."""
    async with serving() as scripted:
        yield scripted


@pytest.fixture
def policy(server: ScriptedServer) -> ScriptedPolicy:
    """What the server does."""
    return server.policy


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[AsyncPolicyClient]:
    """With a deadline that a test can wait for."""
    async with AsyncPolicyClient(server.address, deadline_s=2.0) as connected:
        yield connected
