"""PolicyService on gRPC: deadlines, streams, and refusals as replies.

Bytes that are no request, and errors that were not foreseen, are the gate's (`penstock.rpc.gate`).
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from penstock.actor.serving.request_handler import OnReply, RequestHandler
from penstock.actor.serving.requests import served_versions
from penstock.config.settings import ServingSection
from penstock.protocol import spaces
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.spaces import Space
from penstock.rpc.gate import Context, Malformed
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb

log = logging.getLogger(__name__)

NAME: Final = "penstock.v1.PolicyService"
MAX_IN_FLIGHT: Final = 256
"""Most requests of one stream whose replies are not written yet; at this number the stream is not read."""

Act = Callable[[pb.ActRequest, float, OnReply, Callable[[], bool]], None]
"""`RequestHandler.act`."""


class ActStream:
    """Many requests of one client on one call: read ahead, answered as answers come, in any order.

        request ─► queued at once, without a task ─► pass ─► reply, written in turn; a single one at once

    The cost of a request here, and its share of a forward pass, limit the rate of a stream. One event
    loop uses it.
    """

    def __init__(self, act: Act) -> None:
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._replies: deque[bytes | Exception] = deque()
        self._in_flight = 0
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._is_over = self._is_asking = False

    async def serve(self, requests: AsyncIterator[bytes], context: Context) -> None:
        reader = asyncio.create_task(self._read(requests, context))
        reader.add_done_callback(lambda _done: self._news.set())
        try:
            while await self._has_reply(reader):
                while self._replies:
                    await self._write(context)
        except grpc.aio.InternalError:
            log.debug("a stream's caller has gone with its reply unread")
        finally:
            self._is_over = True
            reader.cancel()

    async def _write(self, context: Context) -> None:
        reply = self._replies.popleft()
        if isinstance(reply, BaseException):
            raise reply
        await context.write(reply)
        # Only now: a client that does not read its replies has no more requests read.
        self._in_flight -= 1
        self._room.set()

    async def _has_reply(self, reader: "asyncio.Task[None]") -> bool:
        """Wait for a reply; False when none will come. Raises the error that ended the reader."""
        while not self._replies:
            if reader.done():
                reader.result()
                if not self._in_flight:
                    return False
            self._news.clear()
            await self._news.wait()
        return True

    async def _read(self, requests: AsyncIterator[bytes], context: Context) -> None:
        count, is_gone = metrics.POLICY_CALLS.labels("act_stream").inc, lambda: self._is_over
        async for data in requests:
            count()
            while self._in_flight >= MAX_IN_FLIGHT:
                self._room.clear()
                await self._room.wait()
            self._in_flight += 1
            # Requests that arrive meanwhile are taken here, without waking the writer.
            self._is_asking = True
            request = pb.ActRequest.FromString(data)
            until_s = self._loop.time() + request.deadline_ms / 1000 if request.deadline_ms else math.inf
            self._act(request, until_s, self._take_reply, is_gone)
            self._is_asking = False
            if not self._replies:
                continue
            if self._in_flight == 1:
                # No reply is being written and no other is to come: a round of the event loop is saved.
                await self._write(context)
            else:
                self._news.set()

    def _take_reply(self, reply: bytes | Exception) -> None:
        self._replies.append(reply)
        if not self._is_asking:
            self._news.set()


class PolicyService:
    """Serves PolicyService. One event loop uses it."""

    def __init__(
        self, handler: RequestHandler, section: ServingSection, described: tuple[str, Space, Space]
    ) -> None:
        """described: run, observation space, action space."""
        self._handler, self._section, self._described = handler, section, described
        self._loop = asyncio.get_running_loop()
        self._count_act = metrics.POLICY_CALLS.labels("act").inc

    def add_to(self, server: "grpc.aio.Server") -> None:
        handler = self._handler
        calls: tuple[tuple[str, str, Any], ...] = (
            ("StartEpisode", "start_episode", handler.start),
            ("Reward", "reward", handler.reward),
            ("EndEpisode", "end_episode", handler.end),
            ("Describe", "describe", self._describe),
        )
        handlers: dict[str, Any] = {}
        for name, label, body in calls:
            request, reply = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Reply")
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                handler.request_errors.refusing(label, reply, body),
                request.FromString,
                reply.SerializeToString,
            )
        # Their replies are bytes; a stream's requests as well.
        handlers["Act"] = grpc.unary_unary_rpc_method_handler(self.act, pb.ActRequest.FromString)
        handlers["ActStream"] = grpc.stream_stream_rpc_method_handler(self.act_stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))

    async def act(self, request: pb.ActRequest, context: Context) -> bytes:
        self._count_act()
        left_s = context.time_remaining()
        until_s = math.inf if left_s is None else self._loop.time() + left_s
        reply: asyncio.Future[bytes] = self._loop.create_future()

        def take_reply(result: bytes | Exception) -> None:
            if reply.done():
                return
            if isinstance(result, bytes):
                reply.set_result(result)
            else:
                reply.set_exception(result)

        self._handler.act(request, until_s, take_reply, reply.done)
        return await reply

    async def act_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Raises Malformed for bytes that are no ActRequest."""
        try:
            await ActStream(self._handler.act).serve(requests, context)
        except DecodeError as error:
            raise Malformed("ActStream: bytes that are no ActRequest") from error

    def _describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        self._handler.reader.check_call(request.policy, "")
        run, observation, action = self._described
        section, served = self._section, self._handler.loaded_versions.served()
        return pb.DescribeReply(
            run=run,
            policy=section.policy,
            observation_space=spaces.to_proto(observation),
            action_space=spaces.to_proto(action),
            versions=served_versions(served),
            max_batch=section.max_request_rows,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_episodes=section.max_episodes,
            reward_window_ms=round(section.reward_window_s * 1000),
            episode_timeout_ms=round(section.episode_timeout_s * 1000),
            server=self._handler.episodes.server,
            learns=self._handler.learning is not None,
            chooses_by_value=any(loaded.policy.chooses_by_value for loaded, _ in served.values()),
        )
