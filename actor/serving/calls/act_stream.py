"""Many requests of one client on one call: read ahead, answered as answers come, in any order.

    request ─► asked at once, without a task of its own ─► pass ─► reply, written in turn; a single one now
                    └─ an episode's, a named version's, or one that needs the fallback ─► a task

A stream is the fast road: what a request costs here beyond its share of a forward pass is what limits its
rate. One event loop uses it.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Final

import grpc

from penstock.actor.serving.calls.request_handler import RequestErrors, RequestHandler
from penstock.actor.serving.inference.batcher import Answer
from penstock.actor.serving.versions.answering import Answered, Asked
from penstock.protocol.refusal import Refused
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 256
"""Requests of one stream whose replies are not written; then it is not read until one is. Nor is it while a
lonely one's reply is written."""


class ActStream:
    """One call. `act` answers any request; `on_answer` is told of answers without an episode."""

    def __init__(
        self,
        handler: RequestHandler,
        act: Callable[[pb.ActRequest, float], Coroutine[Any, Any, bytes]],
        on_answer: Callable[[Answered], None],
    ) -> None:
        self._handler, self._act, self._on_answer = handler, act, on_answer
        self._loop = asyncio.get_running_loop()
        self._replies: deque[bytes | BaseException] = deque()
        self._in_flight = 0
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._is_over = self._is_asking = False

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answer until all is answered or the client has gone. Nothing that it began goes on after it."""
        reader = asyncio.create_task(self._read(requests, context))
        reader.add_done_callback(lambda _done: self._news.set())
        try:
            while await self._has_reply(reader):
                await self._write(context)
        except grpc.aio.InternalError:
            log.debug("a stream's caller has gone with its reply unread")
        finally:
            self._is_over = True
            for begun in (reader, *self._tasks):
                begun.cancel()

    async def _write(self, context: Any) -> None:
        """The next reply; raises what is one."""
        reply = self._replies.popleft()
        if isinstance(reply, BaseException):
            raise reply
        await context.write(reply)
        # Not before: of one that reads no replies no more requests are read.
        self._in_flight -= 1
        self._room.set()

    async def _has_reply(self, reader: "asyncio.Task[None]") -> bool:
        """Wait for one; False when there will be none. Raises what ended the reader."""
        while not self._replies:
            if reader.done():
                reader.result()
                if not self._in_flight:
                    return False
            self._news.clear()
            await self._news.wait()
        return True

    async def _read(self, requests: AsyncIterator[bytes], context: Any) -> None:
        count = metrics.POLICY_CALLS.labels("act_stream").inc
        async for data in requests:
            count()
            while self._in_flight >= MAX_IN_FLIGHT:
                self._room.clear()
                await self._room.wait()
            self._in_flight += 1
            # Requests that arrive meanwhile are taken here, without waking the writer.
            self._is_asking = True
            self._begin(data)
            self._is_asking = False
            if not self._replies:
                continue
            if self._in_flight == 1:
                # No reply is being written and no other is to come: a round of the event loop is saved.
                await self._write(context)
            else:
                self._news.set()

    def _begin(self, data: bytes) -> None:
        question = self._handler.reader.read_plain(data)
        if question is None:
            self._begin_message(pb.ActRequest.FromString(data))
            return
        try:
            choice = self._handler.loaded_versions.choose("")
            answered = partial(self._answered_plain, data)
            self._handler.answerer.ask(choice, question, math.inf, answered, self._is_gone)
        except Refused as error:
            self._say(refusing(self._handler.request_errors, pb.ActRequest.FromString(data), error))

    def _begin_message(self, request: pb.ActRequest) -> None:
        until_s = self._loop.time() + request.deadline_ms / 1000 if request.deadline_ms else math.inf
        if request.episode_id or request.version:
            self._reply_later(self._act(request, until_s))
            return
        try:
            self._handler.ask(request, until_s, partial(self._answered, request), self._is_gone)
        except Refused as error:
            self._say(refusing(self._handler.request_errors, request, error))

    def _is_gone(self) -> bool:
        return self._is_over

    def _answered_plain(self, data: bytes, asked: Asked, said: Answer | Exception | None) -> None:
        """The chosen version has answered a plain request, or has failed to."""
        if not isinstance(said, Answer):
            self._answered(pb.ActRequest.FromString(data), asked, said)
            return
        try:
            answered = self._handler.answerer.complete(asked, said)
            self._on_answer(answered)
            self._say(self._handler.writer.encode_plain(asked.question.request_id, answered, said))
        except Exception as error:  # noqa: BLE001 - raised by `serve`, which holds the call
            self._say(error)

    def _answered(self, request: pb.ActRequest, asked: Asked, said: Answer | Exception | None) -> None:
        """The chosen version has answered, or has failed to."""
        try:
            if isinstance(said, Answer):
                self._say(self._reply(request, self._handler.answerer.complete(asked, said)))
            elif isinstance(said, Refused):
                self._say(refusing(self._handler.request_errors, request, said))
            else:
                self._reply_later(self._fall_back(request, asked, said))
        except Exception as error:  # noqa: BLE001 - raised by `serve`, which holds the call
            self._say(error)

    async def _fall_back(self, request: pb.ActRequest, asked: Asked, error: Exception | None) -> bytes:
        try:
            answered = await self._handler.answerer.fall_back(asked, error)
        except Refused as refusal:
            return refusing(self._handler.request_errors, request, refusal)
        return self._reply(request, answered)

    def _reply(self, request: pb.ActRequest, answered: Answered) -> bytes:
        self._on_answer(answered)
        return self._handler.writer.encode(request, answered)

    def _say(self, reply: bytes | BaseException) -> None:
        self._replies.append(reply)
        if not self._is_asking:
            self._news.set()

    def _reply_later(self, reply: Coroutine[Any, Any, bytes]) -> None:
        task = asyncio.create_task(reply)
        self._tasks.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: "asyncio.Task[bytes]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._say(task.exception() or task.result())


def refusing(request_errors: RequestErrors, request: pb.ActRequest, error: Refused) -> bytes:
    """The reply of a refusal, which is complained of."""
    reply = pb.ActReply(request_id=request.request_id, refusal=request_errors.refused(request, error))
    return reply.SerializeToString()
