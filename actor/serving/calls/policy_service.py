"""PolicyService on gRPC: deadlines, streams, and refusals as replies.

Bytes that are no request, and errors that were not foreseen, are the boundary's (`penstock.rpc.boundary`).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from penstock.actor.serving.calls.act_stream import ActStream, refusing
from penstock.actor.serving.calls.request_handler import EpisodeRequests, EpisodeSteps, RequestHandler
from penstock.actor.serving.codec.requests import ARMS
from penstock.actor.serving.episodes.episodes import Episodes
from penstock.actor.serving.inference.batcher import Question
from penstock.actor.serving.versions.answering import Answered
from penstock.config.settings import ServingSection
from penstock.protocol import spaces
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.refusal import Refused
from penstock.protocol.spaces import Space
from penstock.rpc.boundary import Malformed
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb

NAME: Final = "penstock.v1.PolicyService"

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""
OnAnswered = Callable[[Answered], None]


class PolicyService:
    """Serves PolicyService: deadlines, streams, and refusals as replies. One event loop uses it."""

    def __init__(
        self,
        handler: RequestHandler,
        episode_steps: EpisodeSteps,
        episode_requests: EpisodeRequests,
        episodes: Episodes,
        section: ServingSection,
        described: tuple[str, Space, Space],
        *,
        learns: bool,
        on_answer: OnAnswered,
    ) -> None:
        """described: run, observation space, action space. on_answer: told of answers without an episode."""
        self._handler, self._episode_steps, self._episode_requests, self._episodes = (
            handler,
            episode_steps,
            episode_requests,
            episodes,
        )
        self._section, self._described, self._learns = section, described, learns
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._calls = {
            name: metrics.POLICY_CALLS.labels(name)
            for name in ("act", "start_episode", "reward", "end_episode", "describe")
        }

    def add_to(self, server: "grpc.aio.Server") -> None:
        """Serve all calls from `server`."""
        calls: dict[str, tuple[Any, Any, Any]] = {
            "StartEpisode": (pb.StartEpisodeRequest, pb.StartEpisodeReply, self.start),
            "Reward": (pb.RewardRequest, pb.RewardReply, self.reward),
            "EndEpisode": (pb.EndEpisodeRequest, pb.EndEpisodeReply, self.end),
            "Describe": (pb.DescribeRequest, pb.DescribeReply, self.describe),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                body,
                request_deserializer=request.FromString,
                response_serializer=reply.SerializeToString,
            )
            for name, (request, reply, body) in calls.items()
        }
        # Their replies are bytes; a stream's requests as well.
        handlers["Act"] = grpc.unary_unary_rpc_method_handler(self.act, request_deserializer=self.read_act)
        handlers["ActStream"] = grpc.stream_stream_rpc_method_handler(self.act_stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))

    def read_act(self, data: bytes) -> Question | pb.ActRequest:
        """Return the question of a plain request, and of any other its message; raises DecodeError."""
        question = self._handler.reader.read_plain(data)
        return pb.ActRequest.FromString(data) if question is None else question

    async def act(self, request: Question | pb.ActRequest, context: Context) -> bytes:
        """See policy.proto. request: of `read_act`."""
        self._calls["act"].inc()
        if isinstance(request, pb.ActRequest):
            return await self._answer(request, self._until_s(context))
        try:
            answered = await self._handler.act_plain(request, self._until_s(context))
        except Refused as error:
            message = pb.ActRequest(request_id=request.request_id)
            return refusing(self._handler.request_errors, message, error)
        self._on_answer(answered)
        if answered.answer is None:
            return self._handler.writer.encode(pb.ActRequest(request_id=request.request_id), answered)
        return self._handler.writer.encode_plain(request.request_id, answered, answered.answer)

    def _until_s(self, context: Context) -> float:
        left_s = context.time_remaining()
        return math.inf if left_s is None else self._loop.time() + left_s

    async def _answer(self, request: pb.ActRequest, until_s: float) -> bytes:
        try:
            if request.episode_id:
                return await self._episode_steps.act(request, until_s)
            answered = await self._handler.act(request, until_s)
        except Refused as error:
            return refusing(self._handler.request_errors, request, error)
        self._on_answer(answered)
        return self._handler.writer.encode(request, answered)

    async def act_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer a stream of requests as policy.proto says; ends when its caller goes away.

        Raises Malformed for bytes that are no ActRequest.
        """
        try:
            await ActStream(self._handler, self._answer, self._on_answer).serve(requests, context)
        except DecodeError as error:
            raise Malformed("ActStream: bytes that are no ActRequest") from error

    async def start(self, request: pb.StartEpisodeRequest, _context: Context) -> pb.StartEpisodeReply:
        """See policy.proto."""
        self._calls["start_episode"].inc()
        try:
            return self._episode_requests.start(request)
        except Refused as error:
            return pb.StartEpisodeReply(refusal=self._handler.request_errors.refused(request, error))

    async def reward(self, request: pb.RewardRequest, _context: Context) -> pb.RewardReply:
        """See policy.proto."""
        self._calls["reward"].inc()
        try:
            return await self._episode_requests.reward(request)
        except Refused as error:
            return pb.RewardReply(refusal=self._handler.request_errors.refused(request, error))

    async def end(self, request: pb.EndEpisodeRequest, _context: Context) -> pb.EndEpisodeReply:
        """See policy.proto."""
        self._calls["end_episode"].inc()
        try:
            return self._episode_requests.end(request)
        except Refused as error:
            return pb.EndEpisodeReply(refusal=self._handler.request_errors.refused(request, error))

    async def describe(self, request: pb.DescribeRequest, _context: Context) -> pb.DescribeReply:
        """See policy.proto."""
        self._calls["describe"].inc()
        try:
            self._handler.reader.check_call(request.policy, "")
        except Refused as error:
            return pb.DescribeReply(refusal=self._handler.request_errors.refused(request, error))
        run, observation, action = self._described
        section, served = self._section, self._handler.loaded_versions.served()
        return pb.DescribeReply(
            run=run,
            policy=section.policy,
            observation_space=spaces.to_proto(observation),
            action_space=spaces.to_proto(action),
            versions=[
                pb.ServedVersion(
                    version=version,
                    update=loaded.update,
                    sha256=loaded.sha256,
                    arms=[ARMS[arm] for arm in arms],
                )
                for version, (loaded, arms) in served.items()
            ],
            max_batch=section.max_request_rows,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_episodes=section.max_episodes,
            reward_window_ms=round(section.reward_window_s * 1000),
            episode_timeout_ms=round(section.episode_timeout_s * 1000),
            server=self._episodes.server,
            learns=self._learns,
            chooses_by_value=any(loaded.policy.chooses_by_value for loaded, _ in served.values()),
        )
