"""Many requests of one client on one call: read ahead, answered as answers come, in any order.

    request ─► asked at once, without a task of its own ─► reply
                    └─ an episode's, a named version's, or one that needs the fallback ─► a task

A stream is the fast road: what a request costs here beyond its share of a forward pass is what limits its rate.
One event loop uses it.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import grpc

from actor.serving.desk import Answered, Asked, Desk
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.wire.refusal import Refused

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 256
"""Unanswered requests of one stream; then it is not read until one is answered."""

Reply = pb.ActReply | BaseException


class ActStream:
    """One call. `act` answers any request; `on_answer` is told of answers without an episode."""

    def __init__(
        self,
        desk: Desk,
        act: Callable[[pb.ActRequest, float], Coroutine[Any, Any, pb.ActReply]],
        on_answer: Callable[[Answered], None],
    ) -> None:
        self._desk, self._act, self._on_answer = desk, act, on_answer
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._open: set[asyncio.Future[Any]] = set()

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Until all is answered, or nobody is there any more. Nothing that it began goes on after it."""
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda _done: self._replies.put_nowait(None))
        try:
            while (reply := await self._replies.get()) is not None:
                if isinstance(reply, BaseException):
                    raise reply
                await context.write(reply)
                # Not before: of one that reads no replies no more requests are read.
                self._room.release()
            await reader
        except grpc.aio.InternalError:
            log.debug("a stream's caller has gone with its reply unread")
        finally:
            for begun in (reader, *self._open):
                begun.cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        count = metrics.POLICY_CALLS.labels("act_stream").inc
        async for data in requests:
            count()
            await self._room.acquire()
            self._begin(pb.ActRequest.FromString(data))
        while self._open:
            await asyncio.wait(self._open)

    def _begin(self, request: pb.ActRequest) -> None:
        until_s = self._loop.time() + request.deadline_ms / 1000 if request.deadline_ms else math.inf
        if request.episode_id or request.version:
            self._reply_later(self._act(request, until_s))
            return
        try:
            asked = self._desk.ask(request, until_s)
        except Refused as error:
            self._replies.put_nowait(refusing(request, error))
            return
        if asked.future is None:
            self._reply_later(self._wait_for(request, asked))
        else:
            self._open.add(asked.future)
            asked.future.add_done_callback(lambda _done: self._is_answered(request, asked))

    def _is_answered(self, request: pb.ActRequest, asked: Asked) -> None:
        """The chosen version has answered, or has failed to."""
        assert asked.future is not None
        self._open.discard(asked.future)
        if asked.future.cancelled():
            return
        try:
            answered = self._desk.at_once(asked)
            if answered is None:
                self._reply_later(self._wait_for(request, asked))
            else:
                self._replies.put_nowait(self._reply(request, answered))
        except Exception as error:  # noqa: BLE001 - raised by `serve`, which holds the call
            self._replies.put_nowait(error)

    async def _wait_for(self, request: pb.ActRequest, asked: Asked) -> pb.ActReply:
        try:
            answered = await self._desk.wait_for(asked)
        except Refused as error:
            return refusing(request, error)
        return self._reply(request, answered)

    def _reply(self, request: pb.ActRequest, answered: Answered) -> pb.ActReply:
        self._on_answer(answered)
        return self._desk.reply(request, answered)

    def _reply_later(self, reply: Coroutine[Any, Any, pb.ActReply]) -> None:
        task = asyncio.create_task(reply)
        self._open.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: "asyncio.Task[pb.ActReply]") -> None:
        self._open.discard(task)
        if not task.cancelled():
            self._replies.put_nowait(task.exception() or task.result())


def refusing(request: pb.ActRequest, error: Refused) -> pb.ActReply:
    """The reply of a refusal, which is counted."""
    metrics.REFUSALS.labels(error.refusal.reason.label).inc()
    return pb.ActReply(request_id=request.request_id, refusal=error.refusal.to_proto())
