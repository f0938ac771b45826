"""The clients for code without an event loop: one connection each, used by any number of threads.

Every call returns or raises within `deadline_s`: a PolicyError (`penstock.client.errors`), or ValueError for
a value outside of its space and for malformed messages. Closing a client ends the calls of other threads with
Unreachable.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, Final, Protocol, Self, Unpack

from penstock.client import calls, text_calls
from penstock.client.connection import PLAINTEXT, Connection, GrowingAnswers
from penstock.client.errors import BadReply, EpisodeElsewhere, EpisodeUnknown, PolicyError, typed
from penstock.client.text_calls import (
    DEADLINE_S,
    ConversationOptions,
    ConversationResult,
    Generation,
    Messages,
    SingleOptions,
    TextDescription,
    TextOptions,
    TextPart,
)
from penstock.client.values import Action, ActionBatch, ActOptions, Description, EpisodeResult, StepOptions
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from penstock.v1.text_pb2_grpc import TextServiceStub


class _Client:
    """A client of one policy, which connects when it is first used. Also a context manager.

    Args:
        address: HOST:PORT or unix:/path; plaintext beyond loopback only with `Credentials(insecure=True)`.
        credentials: certificates and token; default: none, for loopback and unix sockets.
        policy: name of the policy.
        deadline_s: of every call, with all its repetitions, in seconds; None: 5 for actions, 60 for text.

    Raises:
        ValueError: the address is malformed, or plaintext is not allowed for it.
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
    ) -> None:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        self._connection = Connection(address, credentials, policy, deadline_s, self._stub)

    def close(self) -> None:
        """Close the connection; the server ends what is open after a while."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


# ---- Actions.


class PolicyClient(_Client):
    """Gives the actions of one policy; see the package for an example."""

    _stub, _deadline_s = PolicyServiceStub, CALL_DEADLINE_S

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

        request_id: the caller's; a repetition under the same one adds nothing, even from another process.
        Returns how many rewards were too late to be learned from.
        """
        return self._connection.do(calls.reward(episode_id, rewards, request_id))


class Episode:
    """An episode that has begun, for one caller, one step at a time.

    Its methods raise EpisodeUnknown or EpisodeElsewhere when the episode cannot continue. After
    DeadlinePassed or Unreachable it is unknown whether the step arrived: the next `act` repeats the step, and
    raises InvalidRequest where it had arrived.
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
    """Gives the answers of one policy to messages.

    client = TextClient("127.0.0.1:50052")
    client.generate([{"role": "user", "content": "Hello"}]).text      without memory
    conversation = client.start_conversation()                  the same, and the system learns from it
    messages.append(conversation.generate(messages).answers[0].message)
    conversation.end(reward=1.0)
    """

    _stub, _deadline_s = TextServiceStub, DEADLINE_S

    def describe(self) -> TextDescription:
        """Return versions and limits, as they are now."""
        return self._connection.do(text_calls.describe(self._connection.policy))

    def generate(self, messages: Messages, **options: Unpack[SingleOptions]) -> Generation:
        """Return answers to messages, without memory; options: see SingleOptions."""
        return self._connection.do(text_calls.generate(self._connection.policy, messages, options))

    def stream(self, messages: Messages, **options: Unpack[SingleOptions]) -> "AnswerStream":
        """Return the same answers part by part."""
        return AnswerStream(self._connection, text_calls.generate(self._connection.policy, messages, options))

    def start_conversation(
        self, client_key: str = "", **options: Unpack[ConversationOptions]
    ) -> "Conversation":
        """Begin a conversation, or continue the one of a name; the same client key gets the same arm.

        Options: `name`, `learned`, `arm`, `must_exist`, `opinions`; see ConversationOptions.
        """
        call = text_calls.start(self._connection.policy, client_key, options)
        return Conversation(self._connection, self._connection.do(call))


class Conversation:
    """A conversation that has begun; one answer at a time.

    Its methods raise EpisodeUnknown or EpisodeElsewhere when the conversation cannot continue.
    """

    def __init__(self, connection: Connection, started: calls.Started) -> None:
        self.conversation_id, self.arm, self.learned = started.id, started.arm, started.learned
        self._connection = connection

    def generate(self, messages: Messages, **options: Unpack[TextOptions]) -> Generation:
        """Return the answer to all messages so far; the same messages once more get the same answer."""
        return self._connection.do(text_calls.turn(self.conversation_id, messages, options))

    def stream(self, messages: Messages, **options: Unpack[TextOptions]) -> "AnswerStream":
        """Return the same answer part by part."""
        return AnswerStream(self._connection, text_calls.turn(self.conversation_id, messages, options))

    def reward(self, amount: float, turn: int | None = None) -> int:
        """Add to the reward of a turn, None: the newest. Returns 1 when it was too late, else 0."""
        return self.rewards([(turn, amount)])

    def rewards(
        self,
        rewards: Iterable[tuple[int | None, float]],
        *,
        request_id: str = "",
        asked: bool = False,
        choice: int | None = None,
    ) -> int:
        """Add to the rewards of turns, as (turn, amount); returns how many of them were too late.

        request_id: a repetition under the same one adds nothing. asked: the person was prompted for these
        opinions, so they are no evidence about the arm. choice: which answer, of a turn that has several.
        """
        call = text_calls.reward(self.conversation_id, rewards, request_id, asked, choice)
        return self._connection.do(call)

    def end(
        self, *, reward: float | None = None, truncated: bool = False, request_id: str = ""
    ) -> ConversationResult:
        """End the conversation; truncated: more would have followed. reward: of the last turn.

        request_id: a repetition under the same one gives the same result; "": a new one.
        """
        return self._connection.do(text_calls.end(self.conversation_id, reward, truncated, request_id))

    def abandon(self) -> ConversationResult:
        """End it without the outcome of its newest turns; those up to the last reward are learned from."""
        return self._connection.do(text_calls.abandon(self.conversation_id))


class AnswerStream(GrowingAnswers):
    """An iterator over parts of answers as they arrive; closing it ends them. Also a context manager."""

    def __iter__(self) -> Iterator[TextPart]:
        """Yield the parts; raises a PolicyError."""
        with typed(self._address):
            for chunk in self._stream:
                if (part := self._part(chunk)) is None:
                    return
                yield part
        raise BadReply("the stream of the policy server ended without a reply")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


# ---- Play an environment in this process with a policy in a server.


_MOST_ABANDONED: Final = 3
"""Consecutive abandoned episodes after which the error is raised."""


class Environment(Protocol):
    """The methods of an environment, as Gymnasium and others have them."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, Any]:
        """Return the first observation, and any further value."""

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, Any]:
        """Return observation, reward, terminated, truncated, and any further value."""


class ExternalEnvironment:
    """Plays episodes with one client.

    An episode that the server no longer has (after a restart, or because another server answers) is
    abandoned, and the next one begins with a reset: the steps of the abandoned episode are not counted.
    """

    def __init__(
        self, client: PolicyClient, *, client_key: str = "", learned: bool = True, deterministic: bool = False
    ) -> None:
        self._client, self._client_key = client, client_key
        self._learned, self._deterministic = learned, deterministic

    def run(self, environment: Environment, episodes: int, *, seed: int | None = None) -> Iterator[float]:
        """Yield the return of each episode, as it ends. `seed`: of the first reset.

        Raises PolicyError where the server cannot be used, and any error that the environment raises.
        """
        played, abandoned = 0, 0
        observation, _ = environment.reset() if seed is None else environment.reset(seed=seed)
        while played < episodes:
            try:
                total_return = self._play(environment, observation)
            except (EpisodeUnknown, EpisodeElsewhere):
                abandoned += 1
                if abandoned >= _MOST_ABANDONED:
                    raise
            else:
                played, abandoned = played + 1, 0
                yield total_return
            if played < episodes:
                observation, _ = environment.reset()

    def _play(self, environment: Environment, observation: Any) -> float:
        """Play one episode to its end; returns its undiscounted return as the server computed it."""
        episode = self._client.start_episode(self._client_key, learned=self._learned)
        reward, terminated, truncated = None, False, False
        try:
            while not (terminated or truncated):
                action = episode.act(observation, reward=reward, deterministic=self._deterministic)
                observation, earned, terminated, truncated, _ = environment.step(action.action)
                reward = float(earned)
            return episode.end(
                terminated=bool(terminated),
                truncated=bool(truncated),
                final_observation=observation,
                reward=reward,
            ).total_return
        except PolicyError:
            raise
        except BaseException:
            # The environment failed: its last step has no outcome to learn from.
            with suppress(PolicyError):
                episode.abandon()
            raise
