"""The clients for an event loop, shared by any number of its tasks, and the client that controls a run.

The contract of `penstock.client.synchronous` holds here too; cancelling a task cancels its call. A client
must be constructed in the running loop, and is also an async context manager.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, ClassVar, Final, Self, TypeVar, Unpack

import grpc

from penstock.client import calls, text_calls
from penstock.client.calls import Call, Codec
from penstock.client.connection import PLAINTEXT, AsyncConnection, Attempts, GrowingAnswers
from penstock.client.errors import (
    BadReply,
    DeadlinePassed,
    InvalidRequest,
    NotAllowed,
    PolicyError,
    Unreachable,
    from_status,
    typed,
)
from penstock.client.text_calls import (
    DEADLINE_S,
    ConversationOptions,
    ConversationResult,
    Generation,
    HttpReply,
    HttpRequest,
    Messages,
    SingleOptions,
    TextDescription,
    TextOptions,
    TextPart,
)
from penstock.client.values import (
    Action,
    ActionBatch,
    ActOptions,
    CommandRefusal,
    CommandReport,
    CommandState,
    Description,
    EpisodeResult,
    RunStatus,
    StepOptions,
)
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.rpc.gate import code_of, text_of
from penstock.v1 import control_pb2
from penstock.v1 import policy_pb2 as pb
from penstock.v1.control_pb2_grpc import ControlServiceStub
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from penstock.v1.text_pb2_grpc import TextServiceStub

T = TypeVar("T")


class _Client:
    """A client of one policy for the tasks of an event loop; arguments as of the one for threads.

    reach_s: seconds for which a call tries a server that cannot be reached again; by default its deadline.
    """

    _stub: ClassVar[type[Any]]
    _deadline_s: ClassVar[float]

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAINTEXT,
        policy: str = "default",
        deadline_s: float | None = None,
        reach_s: float = math.inf,
    ) -> None:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        self._connection = AsyncConnection(address, credentials, policy, deadline_s, self._stub, reach_s)

    async def close(self) -> None:
        """Close the connection and its streams; the server ends what is open after a while."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


# ---- Actions.


class ActStream:
    """Sends many requests over one call; constructed in a running loop. Also an async context manager."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[pb.ActRequest | None] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[pb.ActReply]] = {}
        self._ended: str | None = None
        self._failure: type[PolicyError] = Unreachable
        self._call = connection.stub.ActStream(self._requests())
        self._reading = asyncio.create_task(self._read(), name="act-stream")

    async def act(self, observation: Any, **options: Unpack[ActOptions]) -> Action:
        """Return the action for one observation, as `AsyncPolicyClient.act` does."""
        return await self.ask(lambda codec: codec.act(observation, options))

    async def act_batch(self, observations: Any, **options: Unpack[ActOptions]) -> ActionBatch:
        """Return the actions for B observations, as `AsyncPolicyClient.act_batch` does."""
        return await self.ask(lambda codec: codec.act_batch(observations, options))

    async def ask(self, build: Callable[[Codec], Call[T]]) -> T:
        """Return the result of the Act that `build` makes with the spaces."""
        return await self._connection.ask(build, self._attempt)

    async def aclose(self) -> None:
        """Cancel the stream; pending requests raise Unreachable."""
        self._end("closed")
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def _attempt(self, call: Call[T], attempts: Attempts) -> T:
        if self._ended is not None:
            raise self._error()
        request_id = call.request.request_id
        reply = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(call.request)
        try:
            async with asyncio.timeout(attempts.left_s()):
                return call.result(await reply)
        except TimeoutError as error:
            raise DeadlinePassed(
                f"no reply to {request_id} from {self._connection.address} in time"
            ) from error
        finally:
            del self._waiting[request_id]

    async def _requests(self) -> AsyncIterator[pb.ActRequest]:
        while (request := await self._queue.get()) is not None:
            yield request

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                future = self._waiting.get(reply.request_id)
                if future is not None and not future.done():
                    future.set_result(reply)
            self._end("the server ended it")
        except grpc.RpcError as error:
            failure = from_status(self._connection.address, error)
            self._failure = NotAllowed if isinstance(failure, NotAllowed) else Unreachable
            self._end(str(failure))
        finally:
            self._end("closed")

    def _end(self, why: str) -> None:
        """End the stream: cancel the call, stop its writer, fail all pending requests."""
        if self._ended is not None:
            return
        self._ended = why
        self._call.cancel()
        self._queue.put_nowait(None)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._error())

    def _error(self) -> PolicyError:
        return self._failure(f"the stream to {self._connection.address} is over: {self._ended}")


class AsyncPolicyClient(_Client):
    """Gives the actions of one policy to tasks of an event loop, as `PolicyClient` does to threads."""

    _stub, _deadline_s = PolicyServiceStub, CALL_DEADLINE_S

    async def describe(self) -> Description:
        """Return spaces, versions and limits, as they are now."""
        return await self._connection.do(calls.describe(self._connection.policy))

    async def act(self, observation: Any, **options: Unpack[ActOptions]) -> Action:
        """Return the action for one observation, as `PolicyClient.act` does."""
        return await self._connection.ask(lambda codec: codec.act(observation, options))

    async def act_batch(self, observations: Any, **options: Unpack[ActOptions]) -> ActionBatch:
        """Return the actions for B observations, as `PolicyClient.act_batch` does."""
        return await self._connection.ask(lambda codec: codec.act_batch(observations, options))

    def act_stream(self) -> ActStream:
        """Open one call for many requests in flight; close it, or use it as a context manager."""
        return ActStream(self._connection)

    async def start_episode(self, client_key: str = "", *, learned: bool = True) -> "AsyncEpisode":
        """Begin an episode, as `PolicyClient.start_episode` does."""
        started = await self._connection.do(calls.start(self._connection.policy, client_key, learned))
        return AsyncEpisode(self._connection, started)


class AsyncEpisode:
    """An episode for tasks of an event loop, as `Episode` is for threads."""

    def __init__(self, connection: AsyncConnection, started: calls.Started) -> None:
        self.episode_id, self.arm, self.learned = started.id, started.arm, started.learned
        self._connection = connection
        self._step = 0

    async def act(
        self, observation: Any, *, stream: ActStream | None = None, **options: Unpack[StepOptions]
    ) -> Action:
        """Return the action of the next step, as `Episode.act` does; over `stream` where one is given."""
        way = stream or self._connection
        action = await way.ask(lambda codec: codec.step(self.episode_id, self._step, observation, options))
        self._step = action.step + 1
        return action

    async def reward(self, amount: float, step: int | None = None) -> int:
        """Add to the reward of a step, as `Episode.reward` does."""
        return await self.rewards([(step, amount)])

    async def rewards(self, rewards: Iterable[tuple[int | None, float]]) -> int:
        """Add to the rewards of steps, as `Episode.rewards` does."""
        return await self._connection.do(calls.reward(self.episode_id, rewards))

    async def end(
        self,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final_observation: Any = None,
        reward: float | None = None,
    ) -> EpisodeResult:
        """End the episode, as `Episode.end` does."""
        return await self._connection.ask(
            lambda codec: codec.end(self.episode_id, terminated, truncated, final_observation, reward)
        )

    async def abandon(self) -> EpisodeResult:
        """Abandon the episode, as `Episode.abandon` does."""
        return await self._connection.do(calls.abandon(self.episode_id))


# ---- Text.


class AsyncTextClient(_Client):
    """Gives the answers of one policy to tasks of an event loop, as `TextClient` does to threads."""

    _stub, _deadline_s = TextServiceStub, DEADLINE_S

    async def describe(self) -> TextDescription:
        """Return versions and limits, as they are now."""
        return await self._connection.do(text_calls.describe(self._connection.policy))

    async def generate(self, messages: Messages, **options: Unpack[SingleOptions]) -> Generation:
        """Return answers to messages, as `TextClient.generate` does."""
        return await self._connection.do(text_calls.generate(self._connection.policy, messages, options))

    def stream(self, messages: Messages, **options: Unpack[SingleOptions]) -> "AsyncAnswerStream":
        """Return the same answers part by part."""
        return AsyncAnswerStream(
            self._connection, text_calls.generate(self._connection.policy, messages, options)
        )

    async def start_conversation(
        self, client_key: str = "", **options: Unpack[ConversationOptions]
    ) -> "AsyncConversation":
        """Begin a conversation, as `TextClient.start_conversation` does."""
        call = text_calls.start(self._connection.policy, client_key, options)
        return AsyncConversation(self._connection, await self._connection.do(call))

    async def http(self, request: HttpRequest) -> HttpReply:
        """Return what the server answers to a request to OpenAI's API; raises a PolicyError."""
        return await self._connection.do(Call("Http", request, self._reply, share=1.0), way=self._begin)

    async def _begin(self, call: Call[T], attempts: Attempts) -> T:
        stream = self._connection.stub.Http(call.request, timeout=attempts.timeout_s())
        parts = aiter(stream)
        return call.read((await anext(parts, None), parts, stream))

    def _reply(self, begun: tuple[Any, Any, Any]) -> HttpReply:
        first, parts, stream = begun
        if first is None:
            raise BadReply("the policy server ended its answer before it began")
        return HttpReply(first.status, dict(first.headers), self._bodies(parts, stream))

    async def _bodies(self, parts: Any, stream: Any) -> AsyncGenerator[bytes, None]:
        try:
            with typed(self._connection.address):
                async for part in parts:
                    yield part.body
        finally:
            stream.cancel()


class AsyncConversation:
    """A conversation for tasks of an event loop, as `Conversation` is for threads."""

    def __init__(self, connection: AsyncConnection, started: calls.Started) -> None:
        self.conversation_id, self.arm, self.learned = started.id, started.arm, started.learned
        self._connection = connection

    async def generate(self, messages: Messages, **options: Unpack[TextOptions]) -> Generation:
        """Return the answer to all messages so far, as `Conversation.generate` does."""
        return await self._connection.do(text_calls.turn(self.conversation_id, messages, options))

    def stream(self, messages: Messages, **options: Unpack[TextOptions]) -> "AsyncAnswerStream":
        """Return the same answer part by part."""
        return AsyncAnswerStream(self._connection, text_calls.turn(self.conversation_id, messages, options))

    async def reward(self, amount: float, turn: int | None = None) -> int:
        """Add to the reward of a turn, as `Conversation.reward` does."""
        return await self.rewards([(turn, amount)])

    async def rewards(
        self,
        rewards: Iterable[tuple[int | None, float]],
        *,
        request_id: str = "",
        asked: bool = False,
        choice: int | None = None,
    ) -> int:
        """Add to the rewards of turns, as `Conversation.rewards` does."""
        call = text_calls.reward(self.conversation_id, rewards, request_id, asked, choice)
        return await self._connection.do(call)

    async def end(
        self, *, reward: float | None = None, truncated: bool = False, request_id: str = ""
    ) -> ConversationResult:
        """End the conversation, as `Conversation.end` does."""
        return await self._connection.do(text_calls.end(self.conversation_id, reward, truncated, request_id))

    async def abandon(self) -> ConversationResult:
        """Abandon the conversation, as `Conversation.abandon` does."""
        return await self._connection.do(text_calls.abandon(self.conversation_id))


class AsyncAnswerStream(GrowingAnswers):
    """Parts of answers as they arrive, as an async iterator; closing it ends the answers."""

    async def __aiter__(self) -> AsyncIterator[TextPart]:
        """Yield the parts; raises a PolicyError."""
        with typed(self._address):
            async for chunk in self._stream:
                if (part := self._part(chunk)) is None:
                    return
                yield part
        raise BadReply("the stream of the policy server ended without a reply")


# ---- Control of a run, over the address of its broker.

_STATES: Final = {control_pb2.CommandState.Value(f"COMMAND_STATE_{one.name}"): one for one in CommandState}
_REFUSALS: Final = {
    control_pb2.CommandRefusal.Value(f"COMMAND_REFUSAL_{one.name}"): one
    for one in CommandRefusal
    if one is not CommandRefusal.OTHER
}
_KINDS: Final[dict[grpc.StatusCode | None, type[PolicyError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
}


class AsyncControlClient(_Client):
    """Controls one run. Every method raises a PolicyError where the broker does not answer.

        control = AsyncControlClient("127.0.0.1:50051")
        report = await control.flush("my-flush-1", min_steps=128)      learn from the pending steps
        report = await control.restore("b-1", "before-the-show")        return to a checkpoint

    A command with the same request id is the same command: repeat it until its state is no longer PENDING.
    Cancelling a task does not withdraw its command.

    deadline_s: of one call, in seconds.
    """

    def __init__(
        self, address: str, *, credentials: Credentials = PLAINTEXT, deadline_s: float = CALL_DEADLINE_S
    ) -> None:
        self._connection = AsyncConnection(address, credentials, "", deadline_s, ControlServiceStub)

    async def status(self) -> RunStatus:
        """Return the present state of the run."""
        reply = await self._call("Status", control_pb2.StatusRequest())
        return RunStatus(
            run=reply.run,
            version=reply.latest.version,
            update=reply.latest.update,
            learner=json.loads(reply.learner_json or "{}"),
        )

    async def flush(self, request_id: str, *, min_steps: int = 1, reason: str = "") -> CommandReport:
        """Request a batch of the pending steps, if they are at least `min_steps` environment steps."""
        request = control_pb2.FlushRequest(request_id=request_id, min_steps=min_steps, reason=reason)
        return _report((await self._call("Flush", request)).command)

    async def checkpoint(self, request_id: str, name: str, *, reason: str = "") -> CommandReport:
        """Request a checkpoint that is kept under a name."""
        request = control_pb2.ControlRequest(request_id=request_id, name=name, reason=reason)
        return _report((await self._call("Checkpoint", request)).command)

    async def restore(self, request_id: str, name: str, *, reason: str = "") -> CommandReport:
        """Request that the learner return to a named checkpoint."""
        request = control_pb2.RestoreRequest(request_id=request_id, name=name, reason=reason)
        return _report((await self._call("Restore", request)).command)

    async def _call(self, method: str, request: Any) -> Any:
        broker = self._connection
        try:
            return await getattr(broker.stub, method)(request, timeout=broker.deadline_s)
        except grpc.RpcError as error:
            kind = _KINDS.get(code_of(error), Unreachable)
            raise kind(f"the broker at {broker.address}: {text_of(error)}") from error


def _report(command: control_pb2.Command) -> CommandReport:
    refused = command.state == control_pb2.COMMAND_STATE_REFUSED
    return CommandReport(
        state=_STATES.get(command.state, CommandState.PENDING),
        refusal=_REFUSALS.get(command.refusal, CommandRefusal.OTHER) if refused else None,
        detail=command.detail,
        version=command.version,
        steps=command.steps,
    )
