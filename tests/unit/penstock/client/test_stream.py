"""Many requests in flight over one stream."""

import asyncio
from typing import Any

import grpc
import pytest

from penstock.client import AsyncPolicyClient, DeadlinePassed, NotAllowed, NotReady, Unreachable
from penstock.protocol.refusal import Reason
from tests.support.serving.scripted_server import (
    Happening,
    ScriptedPolicy,
    ScriptedServer,
    fails,
    hangs,
    refuses,
)

OBSERVATION = [0.0, 0.0, 0.0, 0.0]


async def until(condition: Any) -> None:
    """Wait for something that the server does on its own."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.005)


def held(gate: asyncio.Event) -> Happening:
    """The call waits for the gate."""

    async def happening(_request: Any, _context: Any) -> None:
        await gate.wait()

    return happening


async def test_replies_find_their_requests_in_any_order(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    gate = asyncio.Event()
    policy.script["Act"] = [held(gate)]
    async with client.act_stream() as stream:
        first = asyncio.create_task(stream.act([100, 0, 0, 0]))
        await until(lambda: policy.heard["Act"])
        others = await asyncio.gather(*(stream.act([number, 0, 0, 0]) for number in range(50)))
        assert [action.log_prob for action in others] == list(range(50))
        assert not first.done()
        gate.set()
        assert (await first).log_prob == 100
        rows = await stream.act_batch([OBSERVATION, OBSERVATION])
        assert rows.action.tolist() == [0, 0]
        assert policy.streams == 1
    await until(lambda: policy.streams == 0)


async def test_an_episode_can_go_over_a_stream(client: AsyncPolicyClient, policy: ScriptedPolicy) -> None:
    episode = await client.start_episode()
    async with client.act_stream() as stream:
        steps = [(await episode.act(OBSERVATION, stream=stream, reward=1.0)).step for _ in range(3)]
    assert steps == [0, 1, 2]
    assert (await episode.end(terminated=True)).total_return == 3.0


async def test_an_overload_is_waited_out_and_a_refusal_is_one_callers(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    policy.script["Act"] = [refuses(Reason.OVERLOADED, 50), refuses(Reason.NOT_READY)]
    async with client.act_stream() as stream:
        with pytest.raises(NotReady):
            await stream.act(OBSERVATION)
        assert len({request.request_id for request in policy.heard["Act"]}) == 1
        assert (await stream.act(OBSERVATION)).action == 0


async def test_silence_ends_one_request_at_its_deadline(
    server: ScriptedServer, policy: ScriptedPolicy
) -> None:
    gate = asyncio.Event()
    policy.script["Act"] = [held(gate)]
    async with AsyncPolicyClient(server.address, deadline_s=2.0) as client, client.act_stream() as stream:
        with pytest.raises(DeadlinePassed, match="no reply to"):
            await stream.act(OBSERVATION)
        gate.set()
        assert (await stream.act(OBSERVATION)).action == 0


async def test_a_cancelled_request_leaves_the_stream_to_the_others(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    policy.script["Act"] = [hangs]
    async with client.act_stream() as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.act(OBSERVATION), 0.1)
        assert (await stream.act(OBSERVATION)).action == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.UNAVAILABLE, Unreachable), (grpc.StatusCode.PERMISSION_DENIED, NotAllowed)],
)
async def test_a_stream_that_fails_fails_everybody_who_waits(
    client: AsyncPolicyClient, policy: ScriptedPolicy, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    policy.script["Act"] = [hangs, hangs, fails(code)]
    async with client.act_stream() as stream:
        ended = await asyncio.gather(*(stream.act(OBSERVATION) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in ended] == [kind] * 3
        assert all(code.name in str(error) for error in ended)
        with pytest.raises(kind, match="is over"):
            await stream.act(OBSERVATION)
    async with client.act_stream() as another:
        assert (await another.act(OBSERVATION)).action == 0


async def test_a_server_that_goes_away_ends_the_stream(
    server: ScriptedServer, client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    policy.script["Act"] = [hangs, server.closes]
    async with client.act_stream() as stream:
        ended = await asyncio.gather(*(stream.act(OBSERVATION) for _ in range(2)), return_exceptions=True)
        assert [type(error) for error in ended] == [Unreachable] * 2


@pytest.mark.parametrize("what", ["stream", "client"])
async def test_closing_cancels_the_stream_and_who_waits_is_told(
    client: AsyncPolicyClient, policy: ScriptedPolicy, what: str
) -> None:
    policy.script["Act"] = [hangs]
    stream = client.act_stream()
    waiting = asyncio.create_task(stream.act(OBSERVATION))
    await until(lambda: policy.heard["Act"])
    await (stream.aclose() if what == "stream" else client.close())
    with pytest.raises(Unreachable):
        await waiting
    await stream.aclose()
    await until(lambda: policy.streams == 0)
