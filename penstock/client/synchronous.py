"""The clients for code without an event loop: one connection each, used by any number of threads.

Every call returns or raises within `deadline_s`: a PolicyError (`penstock.client.errors`), or ValueError for
a value that the spaces do not allow and messages of another form. Closing a client ends the calls of other
threads with Unreachable.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self, Unpack

from penstock.client import calls, text_calls
from penstock.client.calls import Call
from penstock.client.connection import PLAINTEXT, Connection
from penstock.client.errors import BadReply, typed
from penstock.client.text_calls import (
    DEADLINE_S,
    ConversationResult,
    Generation,
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
    Arm,
    Description,
    EpisodeResult,
    StepOptions,
)
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from penstock.v1.text_pb2_grpc import TextServiceStub


class _Client:
    _connection: Connection

    def close(self) -> None:
        """Close the connection; the server gives what is open up after a while."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


# ---- Actions.


class PolicyClient(_Client):
    """Gives the actions of one policy; see the package for an example. Also a context manager.

    It connects when it is first used.

    Args:
        address: HOST:PORT or unix:/path; plaintext beyond loopback only with `Credentials(insecure=True)`.
        credentials: certificates and token; default: none, for loopback and unix sockets.
        policy: name of the policy.
        deadline_s: of every call, with all its repetitions, in seconds.

    Raises:
        ValueError: the address is malformed, or plaintext was not asked for.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAINTEXT,
        policy: str = "default",
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        self._connection = Connection(address, credentials, policy, deadline_s, PolicyServiceStub)

    def describe(self) -> Description:
        """Return spaces, versions and limits, as they are now."""
        return self._connection.do(calls.describe(self._connection.policy))

    def act(self, observation: Any, **options: Unpack[ActOptions]) -> Action:
        """Return the action for one observation, in the form of the action space: array, dict or tuple.

        Options: `client_key`, `deterministic`, `seed`, `version`, `distribution`, `value`, `mask`, `state`;
        see ActOptions.
        """
        return self._connection.ask(lambda codec: codec.act(observation, options))

    def act_batch(self, observations: Any, **options: Unpack[ActOptions]) -> ActionBatch:
        """Return the actions for B observations, each leaf with a leading axis of B; options as for `act`."""
        return self._connection.ask(lambda codec: codec.act_batch(observations, options))

    def start_episode(self, client_key: str = "", *, learned: bool = True) -> "Episode":
        """Begin an episode; with `learned=False` the system does not learn from it."""
        call = calls.start(self._connection.policy, client_key, learned)
        return Episode(self._connection, self._connection.do(call))

    def reward(self, episode_id: str, rewards: Iterable[tuple[int | None, float]], *, request_id: str) -> int:
        """Add to the rewards of an episode that another process may have begun, as (step, amount).

        request_id: the caller's own; under the same one nothing is added twice, even by another process.
        Returns how many rewards were too late to be learned from.
        """
        return self._connection.do(calls.reward(episode_id, rewards, request_id))


class Episode:
    """An episode that has begun, for one caller, one step at a time.

    Its methods raise EpisodeUnknown or EpisodeElsewhere where it cannot go on. After DeadlinePassed or
    Unreachable it is unknown whether the step arrived: `act` then asks for the same step again, and
    InvalidRequest says that it did.
    """

    def __init__(self, connection: Connection, started: calls.Started) -> None:
        self.episode_id, self.arm, self.learned = started.id, started.arm, started.learned
        self._connection = connection
        self._step = 0

    def act(self, observation: Any, **options: Unpack[StepOptions]) -> Action:
        """Return the action of the next step.

        Options: `reward` (of the step before), `taken_action`, `taken_log_prob`, `deterministic`, `seed`,
        `distribution`, `value`, `mask`; see StepOptions.
        """
        action = self._connection.ask(
            lambda codec: codec.step(self.episode_id, self._step, observation, options)
        )
        self._step = action.step + 1
        return action

    def reward(self, amount: float, step: int | None = None) -> int:
        """Add to the reward of a step, None: the newest.

        Returns 1 when it was too late to be learned from, else 0.
        """
        return self.rewards([(step, amount)])

    def rewards(self, rewards: Iterable[tuple[int | None, float]]) -> int:
        """Add to the rewards of steps, as (step, amount); returns how many of them were too late."""
        return self._connection.do(calls.reward(self.episode_id, rewards))

    def end(
        self,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final_observation: Any = None,
        reward: float | None = None,
    ) -> EpisodeResult:
        """End the episode: it terminated, or it was truncated from outside.

        final_observation: needed where it was truncated. reward: of the last step.
        """
        return self._connection.ask(
            lambda codec: codec.end(self.episode_id, terminated, truncated, final_observation, reward)
        )

    def abandon(self) -> EpisodeResult:
        """End the episode without the outcome of its last step; the steps before it are learned from."""
        return self._connection.do(calls.abandon(self.episode_id))


# ---- Text.


class TextClient(_Client):
    """Gives the answers of one policy to messages. Also a context manager.

        client = TextClient("127.0.0.1:50052")
        client.generate([{"role": "user", "content": "Hello"}]).text      without memory
        conversation = client.start_conversation()                  the same, and the system learns from it
        messages.append(conversation.generate(messages).answers[0].message)
        conversation.end(reward=1.0)

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
        return self._connection.do(text_calls.describe(self._connection.policy))

    def generate(self, messages: Messages, **options: Unpack[SingleOptions]) -> Generation:
        """Return answers to messages, without memory; options: see SingleOptions."""
        return self._connection.do(text_calls.generate(self._connection.policy, messages, options))

    def stream(self, messages: Messages, **options: Unpack[SingleOptions]) -> "AnswerStream":
        """Return the same answers while they grow."""
        return AnswerStream(self._connection, text_calls.generate(self._connection.policy, messages, options))

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
        policy = self._connection.policy
        call = text_calls.start(policy, client_key, name, learned, arm, must_exist, opinions)
        return Conversation(self._connection, self._connection.do(call))


class Conversation:
    """A conversation that has begun; one answer at a time.

    Its methods raise EpisodeUnknown or EpisodeElsewhere where it cannot go on.
    """

    def __init__(self, connection: Connection, started: calls.Started) -> None:
        self.conversation_id, self.arm, self.learned = started.id, started.arm, started.learned
        self._connection = connection

    def generate(self, messages: Messages, **options: Unpack[TextOptions]) -> Generation:
        """Return the answer to all messages so far; the same messages once more get the same answer."""
        return self._connection.do(text_calls.turn(self.conversation_id, messages, options))

    def stream(self, messages: Messages, **options: Unpack[TextOptions]) -> "AnswerStream":
        """Return the same answer while it grows."""
        return AnswerStream(self._connection, text_calls.turn(self.conversation_id, messages, options))

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
        return self._connection.do(text_calls.reward(self.conversation_id, rewards, request_id, asked))

    def end(
        self, *, reward: float | None = None, truncated: bool = False, request_id: str = ""
    ) -> ConversationResult:
        """End the conversation; truncated: more would have followed. reward: of the last turn.

        request_id: said again under the same one it gives the same result; "": one of its own.
        """
        return self._connection.do(text_calls.end(self.conversation_id, reward, truncated, request_id))

    def abandon(self) -> ConversationResult:
        """End it without the outcome of its newest turns; those up to the last reward are learned from."""
        return self._connection.do(text_calls.abandon(self.conversation_id))


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
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
