"""The text client for code without an event loop: one connection, used by any number of threads.

    client = TextClient("127.0.0.1:50052")
    client.generate([{"role": "user", "content": "Hello"}]).text      without memory
    conversation = client.start_conversation()                        the same, and the system learns from it
    messages.append(conversation.generate(messages).answers[0].message)
    conversation.end(reward=1.0)

Every call returns or raises within `deadline_s`: a PolicyError (`penstock.client.errors`), or ValueError for
messages of another form.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, Self, Unpack

from penstock.client import text_calls as calls
from penstock.client.calls import Call
from penstock.client.connection import PLAINTEXT, Attempts, Connection
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
from penstock.client.values import Arm
from penstock.rpc.auth import Credentials
from penstock.v1 import policy_pb2
from penstock.v1.text_pb2_grpc import TextServiceStub

DEADLINE_S: Final = 60.0
"""Of every call, in seconds."""


class TextClient:
    """Gives the answers of one policy; see the module for an example. Also a context manager.

    It connects when it is first used.

    Args:
        address: HOST:PORT or unix:/path; plaintext beyond loopback only with `Credentials(insecure=True)`.
        credentials: certificates and token; default: none, for loopback and unix sockets.
        policy: name of the policy.
        deadline_s: of every call, in seconds.

    Raises:
        ValueError: the address is malformed, or plaintext was not asked for.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAINTEXT,
        policy: str = "default",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._connection = Connection(address, credentials, policy, deadline_s, TextServiceStub)

    def describe(self) -> TextDescription:
        """Return versions and limits, as they are now."""
        return self._connection.do(calls.describe(self._connection.policy))

    def generate(self, messages: Messages, **options: Unpack[SingleOptions]) -> Generation:
        """Return answers to messages, without memory; options: see SingleOptions."""
        call = calls.generate(self._connection.policy, messages, options)
        return self._connection.do(call, Attempts(self._connection.deadline_s, share=1.0))

    def stream(self, messages: Messages, **options: Unpack[SingleOptions]) -> "AnswerStream":
        """Return the same answers while they grow."""
        return AnswerStream(self._connection, calls.generate(self._connection.policy, messages, options))

    def start_conversation(
        self,
        client_key: str = "",
        *,
        name: str = "",
        learned: bool = True,
        arm: Arm | None = None,
        must_exist: bool = False,
        opinions: bool = False,
    ) -> "Conversation":
        """Begin a conversation, or return to the one of this name.

        client_key: the same key gets the same arm. learned: False: the system does not learn from it.
        arm: follow this one; None: that of the key. must_exist: raise EpisodeUnknown where there is none of
        this name, instead of beginning one. opinions: its rewards are what a person thinks of answers, so a
        canary is judged by how many of all conversations were liked.
        """
        call = calls.start(self._connection.policy, client_key, name, learned, arm, must_exist, opinions)
        return Conversation(self._connection, self._connection.do(call))

    def close(self) -> None:
        """Close the connection; the server gives open conversations up after a while."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the client."""
        self.close()


class Conversation:
    """A conversation that has begun; one answer at a time.

    Its methods raise EpisodeUnknown or EpisodeElsewhere where it cannot go on.
    """

    def __init__(self, connection: Connection, started: calls.Started) -> None:
        self.conversation_id, self.arm, self.learned = (
            started.conversation_id,
            started.arm,
            started.learned,
        )
        self._connection = connection

    def generate(self, messages: Messages, **options: Unpack[TextOptions]) -> Generation:
        """Return the answer to all messages so far; the same messages once more get the same answer."""
        call = calls.turn(self.conversation_id, messages, options)
        return self._connection.do(call, Attempts(self._connection.deadline_s, share=1.0))

    def stream(self, messages: Messages, **options: Unpack[TextOptions]) -> "AnswerStream":
        """Return the same answer while it grows."""
        return AnswerStream(self._connection, calls.turn(self.conversation_id, messages, options))

    def reward(self, amount: float, turn: int | None = None) -> int:
        """Add to the reward of a turn, None: the newest. Returns 1 when it was too late, else 0."""
        return self.rewards([(turn, amount)])

    def rewards(
        self, rewards: Iterable[tuple[int | None, float]], *, request_id: str = "", asked: bool = False
    ) -> int:
        """Add to the rewards of turns, as (turn, amount); returns how many of them were too late.

        request_id: under the same one nothing is added twice. asked: of opinions, the person was asked about
        these turns, so they say nothing about the arm.
        """
        return self._connection.do(calls.reward(self.conversation_id, rewards, request_id, asked))

    def end(
        self, *, reward: float | None = None, truncated: bool = False, request_id: str = ""
    ) -> ConversationResult:
        """End the conversation; truncated: more would have followed. reward: of the last turn.

        request_id: said again under the same one it gives the same result; "": one of its own.
        """
        ending = policy_pb2.ENDING_TRUNCATED if truncated else policy_pb2.ENDING_TERMINATED
        call = calls.end(self.conversation_id, ending=ending, amount=reward, request_id=request_id)
        return self._connection.do(call)

    def abandon(self) -> ConversationResult:
        """End it without the outcome of its newest turns; those up to the last reward are learned from."""
        call = calls.end(self.conversation_id, ending=policy_pb2.ENDING_ABANDONED, amount=None)
        return self._connection.do(call)


class AnswerStream:
    """Parts of answers as they come, as an iterator. Closing it ends the answers; also a context manager."""

    def __init__(self, connection: Connection, call: Call[Generation]) -> None:
        self._connection, self._call = connection, call
        self._stream: Any = connection.stub.GenerateStream(call.request, timeout=connection.deadline_s)
        self.result: Generation | None = None
        """All of the answers; None until the last part has come."""

    def __iter__(self) -> Iterator[TextPart]:
        """Yield the parts; raises a PolicyError."""
        with typed(self._connection.address):
            for chunk in self._stream:
                if chunk.HasField("reply"):
                    self.result = self._call.result(chunk.reply)
                    return
                yield TextPart(index=chunk.index, text=chunk.text)
        raise BadReply("the stream of the policy server ended without a reply")

    def close(self) -> None:
        """End the answers that grow."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the stream."""
        self.close()
