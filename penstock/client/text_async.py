"""The text client for an event loop: the same calls, shared by any number of tasks of one loop.

The contract of `penstock.client.text_client` holds here too; cancelling a task cancels its call.
"""

import math
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self, Unpack

from penstock.client import text_calls as calls
from penstock.client.calls import Call
from penstock.client.connection import PLAINTEXT, AsyncConnection
from penstock.client.errors import BadReply, typed
from penstock.client.text_calls import (
    ConversationResult,
    Generation,
    Messages,
    SingleOptions,
    TextDescription,
    TextOptions,
    TextPart,
)
from penstock.client.text_client import DEADLINE_S
from penstock.client.values import Arm
from penstock.rpc.auth import Credentials
from penstock.v1 import policy_pb2
from penstock.v1.text_pb2_grpc import TextServiceStub


class AsyncTextClient:
    """Gives the answers of one policy to tasks of an event loop, as `TextClient` does to threads.

    Make it where the loop runs; it is also an async context manager.

    reach_s: seconds for which a call tries a server that cannot be reached again; by default its deadline.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAINTEXT,
        policy: str = "default",
        deadline_s: float = DEADLINE_S,
        reach_s: float = math.inf,
    ) -> None:
        self._connection = AsyncConnection(
            address, credentials, policy, deadline_s, TextServiceStub, reach_s=reach_s
        )

    async def describe(self) -> TextDescription:
        """Return versions and limits, as they are now."""
        return await self._connection.do(calls.describe(self._connection.policy))

    async def generate(self, messages: Messages, **options: Unpack[SingleOptions]) -> Generation:
        """Return answers to messages, as `TextClient.generate` does."""
        call = calls.generate(self._connection.policy, messages, options)
        return await self._connection.do(call, self._connection.attempts(share=1.0))

    def stream(self, messages: Messages, **options: Unpack[SingleOptions]) -> "AsyncAnswerStream":
        """Return the same answers while they grow."""
        return AsyncAnswerStream(self._connection, calls.generate(self._connection.policy, messages, options))

    async def start_conversation(
        self,
        client_key: str = "",
        *,
        name: str = "",
        learned: bool = True,
        arm: Arm | None = None,
        must_exist: bool = False,
        opinions: bool = False,
    ) -> "AsyncConversation":
        """Begin a conversation, as `TextClient.start_conversation` does."""
        call = calls.start(self._connection.policy, client_key, name, learned, arm, must_exist, opinions)
        return AsyncConversation(self._connection, await self._connection.do(call))

    async def close(self) -> None:
        """Close the connection; the server gives open conversations up after a while."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the client."""
        await self.close()


class AsyncConversation:
    """A conversation for tasks of an event loop, as `Conversation` is for threads."""

    def __init__(self, connection: AsyncConnection, started: calls.Started) -> None:
        self.conversation_id, self.arm, self.learned = (
            started.conversation_id,
            started.arm,
            started.learned,
        )
        self._connection = connection

    async def generate(self, messages: Messages, **options: Unpack[TextOptions]) -> Generation:
        """Return the answer to all messages so far, as `Conversation.generate` does."""
        call = calls.turn(self.conversation_id, messages, options)
        return await self._connection.do(call, self._connection.attempts(share=1.0))

    def stream(self, messages: Messages, **options: Unpack[TextOptions]) -> "AsyncAnswerStream":
        """Return the same answer while it grows."""
        return AsyncAnswerStream(self._connection, calls.turn(self.conversation_id, messages, options))

    async def reward(self, amount: float, turn: int | None = None) -> int:
        """Add to the reward of a turn, as `Conversation.reward` does."""
        return await self.rewards([(turn, amount)])

    async def rewards(
        self, rewards: Iterable[tuple[int | None, float]], *, request_id: str = "", asked: bool = False
    ) -> int:
        """Add to the rewards of turns, as `Conversation.rewards` does."""
        return await self._connection.do(calls.reward(self.conversation_id, rewards, request_id, asked))

    async def end(
        self, *, reward: float | None = None, truncated: bool = False, request_id: str = ""
    ) -> ConversationResult:
        """End the conversation, as `Conversation.end` does."""
        ending = policy_pb2.ENDING_TRUNCATED if truncated else policy_pb2.ENDING_TERMINATED
        call = calls.end(self.conversation_id, ending=ending, amount=reward, request_id=request_id)
        return await self._connection.do(call)

    async def abandon(self) -> ConversationResult:
        """Abandon the conversation, as `Conversation.abandon` does."""
        call = calls.end(self.conversation_id, ending=policy_pb2.ENDING_ABANDONED, amount=None)
        return await self._connection.do(call)


class AsyncAnswerStream:
    """Parts of answers as they come, as an async iterator; closing it ends the answers."""

    def __init__(self, connection: AsyncConnection, call: Call[Generation]) -> None:
        self._connection, self._call = connection, call
        self._stream: Any = connection.stub.GenerateStream(call.request, timeout=connection.deadline_s)
        self.result: Generation | None = None
        """All of the answers; None until the last part has come."""

    async def __aiter__(self) -> AsyncIterator[TextPart]:
        """Yield the parts; raises a PolicyError."""
        with typed(self._connection.address):
            async for chunk in self._stream:
                if chunk.HasField("reply"):
                    self.result = self._call.result(chunk.reply)
                    return
                yield TextPart(index=chunk.index, text=chunk.text)
        raise BadReply("the stream of the policy server ended without a reply")

    def close(self) -> None:
        """End the answers that grow."""
        self._stream.cancel()
