"""A peer that keeps the contract of policy.proto and does what a test scripts: no policy, no environment.

Every request is noted; what a test put into `script` for its method happens first. An action is the low end
of its space (0 for Discrete: its start), and `log_prob` of a row is the sum of its observation, so that a
reply shows which request it answers. Calls under a `request_id` that was answered get the same reply again.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import numpy as np

from penstock.protocol import spaces
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.tensor import Array, from_tensor, to_tensor
from penstock.v1 import policy_pb2 as pb
from penstock.v1.policy_pb2_grpc import PolicyServiceServicer, add_PolicyServiceServicer_to_server

CARTPOLE: Final = (
    spaces.Box(np.full(4, -np.inf, np.float32), np.full(4, np.inf, np.float32)),
    spaces.Discrete(2),
)
VERSION: Final = 7

Happening = Callable[[Any, Any], Awaitable[Refusal | None]]


class ScriptedPolicy(PolicyServiceServicer):
    """See the module.

    `script[method]` holds what happens at the next calls, in order, before each is answered.

    `lost[method]` happens after the call was heard and before its reply goes out.
    """

    def __init__(self, observation: spaces.Space, action: spaces.Space) -> None:
        self.spaces = (observation, action)
        self.heard: dict[str, list[Any]] = defaultdict(list)
        self.script: dict[str, list[Happening]] = defaultdict(list)
        self.lost: dict[str, list[Happening]] = defaultdict(list)
        self.answered: dict[str, Any] = {}
        self.rewards: dict[str, list[float]] = {}
        self.steps: dict[str, int] = {}
        self.streams = 0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:  # noqa: N802
        await self._happens("Describe", request, context)
        observation, action = map(spaces.to_proto, self.spaces)
        version = pb.ServedVersion(
            version=VERSION, update=3, sha256="ab", arms=[pb.ARM_LATEST, pb.ARM_ACTIVE]
        )
        return pb.DescribeReply(
            run="scripted", policy=request.policy, observation_space=observation, action_space=action,
            versions=[version], max_batch=64, max_message_bytes=2**23, max_episodes=8, reward_window_ms=100,
            episode_timeout_ms=2000, server="peer", learns=True,
        )  # fmt: skip

    async def Act(self, request: pb.ActRequest, context: Any) -> pb.ActReply:  # noqa: N802
        refusal = await self._happens("Act", request, context)
        if refusal is None and request.episode_id and request.episode_id not in self.steps:
            refusal = Refusal(reason=Reason.EPISODE_UNKNOWN, detail=request.episode_id)
        if refusal is not None:
            return pb.ActReply(refusal=refusal.to_proto(), request_id=request.request_id)
        reply: pb.ActReply = await self._once(
            "Act", request, context, lambda: answer(request, self.spaces[1], self._step(request))
        )
        return reply

    async def ActStream(self, requests: Any, context: Any) -> AsyncIterator[pb.ActReply]:  # noqa: N802
        """Each request is a task of its own, so that replies come in any order."""
        self.streams += 1
        replies: asyncio.Queue[pb.ActReply | BaseException] = asyncio.Queue()

        async def serve(request: pb.ActRequest) -> None:
            try:
                replies.put_nowait(await self.Act(request, context))
            except Exception as error:  # noqa: BLE001 - it ends the stream
                replies.put_nowait(error)

        async def receive() -> None:
            async for request in requests:
                tasks.create_task(serve(request))

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receive())
                while isinstance(reply := await replies.get(), pb.ActReply):
                    yield reply
                raise reply
        finally:
            self.streams -= 1

    async def StartEpisode(  # noqa: N802
        self, request: pb.StartEpisodeRequest, context: Any
    ) -> pb.StartEpisodeReply:
        """The ids are `peer-1`, `peer-2` and so on."""
        refusal = await self._happens("StartEpisode", request, context)
        if refusal is not None:
            return pb.StartEpisodeReply(refusal=refusal.to_proto())
        reply: pb.StartEpisodeReply = await self._once(
            "StartEpisode", request, context, lambda: self._start(request)
        )
        return reply

    async def Reward(self, request: pb.RewardRequest, context: Any) -> pb.RewardReply:  # noqa: N802
        """Added up once; those that name a step are late."""
        refusal = await self._happens("Reward", request, context)
        if refusal is not None:
            return pb.RewardReply(refusal=refusal.to_proto())

        def add() -> pb.RewardReply:
            self.rewards[request.episode_id] += [given.amount for given in request.rewards]
            return pb.RewardReply(late=sum(given.HasField("step") for given in request.rewards))

        reply: pb.RewardReply = await self._once("Reward", request, context, add)
        return reply

    async def EndEpisode(self, request: pb.EndEpisodeRequest, context: Any) -> pb.EndEpisodeReply:  # noqa: N802
        refusal = await self._happens("EndEpisode", request, context)
        if refusal is not None:
            return pb.EndEpisodeReply(refusal=refusal.to_proto())

        def end() -> pb.EndEpisodeReply:
            total = sum(self.rewards[request.episode_id]) + request.reward
            return pb.EndEpisodeReply(total_return=total, length=self.steps.pop(request.episode_id))

        reply: pb.EndEpisodeReply = await self._once("EndEpisode", request, context, end)
        return reply

    async def _happens(self, method: str, request: Any, context: Any) -> Refusal | None:
        self.heard[method].append(request)
        return await self.script[method].pop(0)(request, context) if self.script[method] else None

    async def _once(self, method: str, request: Any, context: Any, make: Callable[[], Any]) -> Any:
        reply = self.answered.get(request.request_id)
        if reply is None:
            reply = self.answered[request.request_id] = make()
        if self.lost[method]:
            await self.lost[method].pop(0)(request, context)
        return reply

    def _start(self, request: pb.StartEpisodeRequest) -> pb.StartEpisodeReply:
        episode_id = f"peer-{len(self.rewards) + 1}"
        self.rewards[episode_id], self.steps[episode_id] = [], 0
        return pb.StartEpisodeReply(episode_id=episode_id, arm=pb.ARM_LATEST, learned=not request.not_learned)

    def _step(self, request: pb.ActRequest) -> int:
        if not request.episode_id:
            return 0
        self.rewards[request.episode_id].append(request.reward)
        self.steps[request.episode_id] += 1
        return self.steps[request.episode_id] - 1


def answer(request: pb.ActRequest, action: spaces.Space, step: int) -> pb.ActReply:
    """The reply to one request."""
    rows = request.batch or 1
    leading = (request.batch,) if request.batch else ()
    sums = np.zeros(rows)
    for part in request.observation:
        sums += from_tensor(part.path, part.value).reshape(rows, -1).astype(float).sum(1)
    probability = to_tensor(np.full((*leading, 2), 0.5, np.float32))
    return pb.ActReply(
        request_id=request.request_id,
        action=[
            pb.Part(path=path, value=to_tensor(low(leaf, leading))) for path, leaf in spaces.leaves(action)
        ],
        log_prob=list(sums),
        distribution=[pb.Part(path="probability", value=probability)] if request.want_distribution else [],
        value=list(-sums) if request.want_value else [],
        version=VERSION,
        arm=pb.ARM_PINNED if request.version else pb.ARM_LATEST,
        episode_id=request.episode_id,
        step=step,
        state=request.state,
    )


def low(leaf: spaces.Leaf, leading: tuple[int, ...]) -> Array:
    value = spaces.zeros(leaf, leading)
    if isinstance(leaf, spaces.Discrete):
        value[...] = leaf.start
    elif isinstance(leaf, spaces.Box):
        value[...] = leaf.low
    return value


def refuses(reason: Reason, retry_after_ms: int = 0) -> Happening:
    async def happening(_request: Any, _context: Any) -> Refusal:
        return Refusal(reason=reason, detail="scripted", retry_after_ms=retry_after_ms)

    return happening


def fails(code: grpc.StatusCode) -> Happening:
    async def happening(_request: Any, context: Any) -> None:
        await context.abort(code, "scripted")

    return happening


async def hangs(_request: Any, _context: Any) -> None:
    await asyncio.Event().wait()


class ScriptedServer:
    """A server at an address that stays the same when it is restarted."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.address = "127.0.0.1:0"
        self._server: grpc.aio.Server | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        add_PolicyServiceServicer_to_server(self.policy, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        await self._server.start()

    async def stop(self) -> None:
        if self._restarting is not None:
            await self._restarting
        if self._server is not None:
            await self._server.stop(None)

    async def closes(self, _request: Any, _context: Any) -> None:
        """The connection is closed instead of a reply, and the server comes back."""
        self._restarting = asyncio.create_task(self._restart())
        await asyncio.Event().wait()

    async def _restart(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
        await self.start()


@asynccontextmanager
async def serving(
    observation: spaces.Space = CARTPOLE[0], action: spaces.Space = CARTPOLE[1]
) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(ScriptedPolicy(observation, action))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
