"""A stream of requests: each is answered under its id, whatever it needs, and nothing outlives the call."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

import pytest
from google.protobuf.message import DecodeError

from penstock.actor.serving.batcher import Answered
from penstock.actor.serving.policy_service import MAX_IN_FLIGHT, ActStream
from penstock.actor.serving.request_handler import OnReply
from penstock.protocol.refusal import Reason, Refusal
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import Stand, broken, policy_of, seen


class Caller:
    """gRPC's side of a call: what the server writes, which is read when `reads` is set."""

    def __init__(self) -> None:
        self.replies: list[pb.ActReply] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._is_written = False

    async def write(self, reply: bytes) -> None:
        """As a ServicerContext does: gRPC takes one at a time."""
        assert not self._is_written
        self._is_written = True
        await asyncio.sleep(0)
        await self.reads.wait()
        self._is_written = False
        self.replies.append(pb.ActReply.FromString(reply))

    def by_id(self) -> dict[str, pb.ActReply]:
        """Each id once."""
        assert len({reply.request_id for reply in self.replies}) == len(self.replies)
        return {reply.request_id: reply for reply in self.replies}


async def stream_of(requests: Iterable[pb.ActRequest | bytes]) -> AsyncIterator[bytes]:
    """As a client sends them."""
    for request in requests:
        await asyncio.sleep(0)
        yield request if isinstance(request, bytes) else request.SerializeToString()


async def test_every_kind_of_request_is_answered_under_its_id() -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)
    stand.keep(7)
    requests = {
        "plain": stand.asking(seen(0), request_id="plain"),
        "episode": stand.asking(seen(0), request_id="episode", episode_id=stand.start()),
        "version": stand.asking(seen(0), request_id="version", version=7),
        "wrong": pb.ActRequest(request_id="wrong"),
        "unknown": stand.asking(seen(0), request_id="unknown", version=99),
    }
    await ActStream(stand.handler.act).serve(stream_of(requests.values()), caller)
    replies = caller.by_id()
    assert set(replies) == set(requests)
    assert [replies[name].version for name in ("plain", "episode", "version")] == [1, 1, 7]
    assert Refusal.from_proto(replies["wrong"].refusal).reason is Reason.INVALID  # type: ignore[union-attr]
    assert Refusal.from_proto(replies["unknown"].refusal).reason is Reason.UNKNOWN_VERSION  # type: ignore[union-attr]
    assert len(stand.told) == 3  # what was refused is no answer


async def test_requests_in_flight_share_forward_passes() -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)
    count = 3 * MAX_IN_FLIGHT
    await ActStream(stand.handler.act).serve(stream_of(stand.asking(seen(0)) for _ in range(count)), caller)
    assert len(caller.by_id()) == count


async def test_the_fallback_answers_a_stream_too() -> None:
    stand, caller = Stand(), Caller()
    await ActStream(stand.handler.act).serve(stream_of([stand.asking(seen(0))]), caller)
    assert caller.replies[-1].fallback == pb.FALLBACK_UNIFORM
    for version, policy in ((1, None), (2, broken(policy_of(stand.specification, 2)))):
        await stand.publish(version, policy=policy)
        await ActStream(stand.handler.act).serve(stream_of([stand.asking(seen(0))]), caller)
    assert (caller.replies[-1].version, caller.replies[-1].fallback) == (1, pb.FALLBACK_PREVIOUS)
    assert [answered.fallback for answered in stand.told] == ["uniform", "", "previous"]
    assert [answered.not_finite for answered in stand.told] == [False, False, True]


async def test_a_request_is_not_answered_after_its_deadline() -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)
    late, patient = (
        stand.asking(seen(0), request_id=name, deadline_ms=ms) for name, ms in (("late", 1), ("patient", 0))
    )
    stand.batcher._is_busy = True  # a pass is under way
    serving = asyncio.create_task(ActStream(stand.handler.act).serve(stream_of([late, patient]), caller))
    waiting, clock = stand.batcher._waiting, stand.batcher._loop.time
    while len(waiting) < 2 or clock() < waiting[0].until_s:  # noqa: ASYNC110 - there is no event for time that passes
        await asyncio.sleep(0.001)
    stand.batcher._is_busy = False
    stand.batcher._schedule(0.0)
    await serving
    replies = caller.by_id()
    assert Refusal.from_proto(replies["late"].refusal).reason is Reason.DEADLINE  # type: ignore[union-attr]
    assert replies["patient"].version == 1


async def test_bytes_that_are_no_request_end_the_stream() -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)
    with pytest.raises(DecodeError):
        await ActStream(stand.handler.act).serve(stream_of([stand.asking(seen(0)), b"\xff\xff"]), caller)


async def test_an_unforeseen_error_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)

    def fail(_answered: Answered) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stand.handler, "_note_answered", fail)
    with pytest.raises(ZeroDivisionError):
        await ActStream(stand.handler.act).serve(stream_of([stand.asking(seen(0))]), caller)


async def test_a_reply_waits_for_no_other_request_of_its_stream() -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)
    slow = list[Callable[[], None]]()

    def act(request: pb.ActRequest, until_s: float, on_reply: OnReply, is_gone: Callable[[], bool]) -> None:
        if request.request_id == "slow":
            slow.append(partial(stand.handler.act, request, until_s, on_reply, is_gone))
        else:
            stand.handler.act(request, until_s, on_reply, is_gone)

    async def requests() -> AsyncIterator[bytes]:
        yield stand.asking(seen(0), request_id="slow").SerializeToString()
        yield stand.asking(seen(0), request_id="plain").SerializeToString()
        while not caller.replies:  # noqa: ASYNC110 - rounds of the loop are what is waited for
            await asyncio.sleep(0)
        slow[0]()

    await ActStream(act).serve(requests(), caller)
    assert [reply.request_id for reply in caller.replies] == ["plain", "slow"]


@pytest.mark.parametrize(("expected", "most"), [(1, 1), (MAX_IN_FLIGHT, MAX_IN_FLIGHT + 1)])
async def test_a_caller_that_goes_away_leaves_nothing_behind(expected: int, most: int) -> None:
    stand, caller = Stand(), Caller()
    await stand.publish(1)
    stand.batcher._expected = expected
    caller.reads.clear()
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            await asyncio.sleep(0)
            read += 1
            yield stand.asking(seen(0)).SerializeToString()

    before = asyncio.all_tasks()
    call = asyncio.create_task(ActStream(stand.handler.act).serve(endless(), caller))
    while read < most:  # noqa: ASYNC110 - rounds of the loop are what is counted
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert read == most
    call.cancel()
    await asyncio.wait([call])
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
