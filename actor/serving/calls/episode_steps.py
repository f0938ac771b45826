"""Acts of an episode: each is one step, however often it is sent.

    read ─► ask (one forward pass for many) ─► step ─► reply, to all who wait for it
       └─ somebody's own action: no pass ────────┘

A step happens in one piece, after its answer and before its reply: a caller that hangs up, runs out of time or is
refused finds the episode as it was, or finds the very reply that it lost.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actor.serving.calls.request_handler import Desk
from actor.serving.calls.step_rewards import of_step_before
from actor.serving.episodes.episodes import Episode, Episodes
from actor.serving.episodes.segments import Row
from actor.serving.experience.recorder import Learning
from actor.serving.experience.served_queue import count_not_learned
from actor.serving.inference.forward_pass import Answer, Loaded, Question
from actor.serving.versions.answering import Answered, Asked
from actor.serving.versions.loaded_versions import Choice
from penstock.policy.distributions import ActionHead
from penstock.v1 import policy_pb2 as pb
from penstock.wire.refusal import Reason, Refusal, Refused, invalid


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A step that is under way. reward: of the step before.   taken: what the caller does instead of asking."""

    episode: Episode
    request: pb.ActRequest
    question: Question
    reward: float | None
    choice: Choice
    taken: Row | None


class Turns:
    """One event loop uses it; `now` in seconds, monotonic."""

    def __init__(
        self,
        desk: Desk,
        episodes: Episodes,
        learning: Learning | None,
        slow_s: float,
        now: Callable[[], float],
    ) -> None:
        """learning: None where nothing is learned from. slow_s: an answer that takes longer is slow."""
        self._desk, self._episodes, self._learning = desk, episodes, learning
        self._slow_s, self._now = slow_s, now
        self._loop = asyncio.get_running_loop()
        self._falling_back: set[asyncio.Task[None]] = set()

    async def act(self, request: pb.ActRequest, until_s: float) -> bytes:
        """The reply to the next step, or the one that this request was given before; raises Refused."""
        self._desk.reader.check_call(request.policy, request.request_id)
        episode = self._episodes.find(request.episode_id, self._now())
        mine: asyncio.Future[bytes] = self._loop.create_future()
        if request.request_id and request.request_id == episode.last_request:
            if episode.waiting is not None:
                episode.waiting.append(mine)
                return await mine
            if episode.last_reply:
                return episode.last_reply
        _check_turn(episode, request)
        turn = self._read(episode, request)
        episode.last_request, episode.last_reply, episode.waiting = request.request_id, b"", [mine]
        try:
            self._begin(turn, until_s)
        except Exception:
            episode.waiting = None
            raise
        return await mine

    def _read(self, episode: Episode, request: pb.ActRequest) -> Turn:
        question = self._desk.reader.read(request)
        if episode.state:
            question = replace(question, observation={**question.observation, **episode.state})
        reward, taken = of_step_before(episode, request), self._desk.reader.read_taken(request)
        return Turn(episode, request, question, reward, self._choose(episode), taken)

    def _choose(self, episode: Episode) -> Choice:
        """Newer weights only where a segment begins."""
        shelf, loaded = self._desk.shelf, episode.loaded
        if loaded is None or episode.trail.is_due(self._now()):
            return shelf.follow(episode.arm, episode.client_key)
        return Choice(episode.arm, loaded, False, shelf.shadow_of(loaded))

    # ------------------------------------------------------------ the answer

    def _begin(self, turn: Turn, until_s: float) -> None:
        question, taken = turn.question, turn.taken
        if taken is None or question.distribution or question.value or self._desk.reader.remembers:
            # Whether its caller is there or not: it may come again for the reply.
            self._desk.answerer.ask(turn.choice, question, until_s, partial(self._told, turn), _is_never_gone)
        else:
            arm = turn.episode.arm
            self._step(turn, Answered(arm=arm, action=taken, answer=None, fallback="", seconds=0.0))

    def _told(self, turn: Turn, asked: Asked, said: Answer | Exception | None) -> None:
        """The chosen version has answered, or has failed to."""
        try:
            if isinstance(said, Answer):
                self._step(turn, self._desk.answerer.complete(asked, said))
            elif isinstance(said, Refused):
                _tell(turn.episode, said)
            else:
                task = self._loop.create_task(self._fall_back(turn, asked, said))
                self._falling_back.add(task)
                task.add_done_callback(self._falling_back.discard)
        except Exception as error:  # noqa: BLE001 - raised by `act`; others share the pass
            _tell(turn.episode, error)

    async def _fall_back(self, turn: Turn, asked: Asked, error: Exception | None) -> None:
        try:
            self._step(turn, await self._desk.answerer.fall_back(asked, error))
        except Exception as refused:  # noqa: BLE001 - raised by `act`
            _tell(turn.episode, refused)

    # ------------------------------------------------------------ the step

    def _step(self, turn: Turn, answered: Answered) -> None:
        """It happens, and who waits for the reply gets it."""
        episode, request = turn.episode, turn.request
        played = self._play(turn, answered)
        if episode.is_over:
            raise Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail="the episode has ended meanwhile"))
        reply = self._reply(turn, answered)
        # From here on nothing fails: the step has happened.
        if turn.reward is not None:
            episode.add_reward(episode.trail.length - 1, turn.reward)
        self._record(turn, answered, played)
        episode.last_reply = reply
        if request.request_id:
            episode.acted.append(request.request_id)
        _tell(episode, reply)

    def _play(self, turn: Turn, answered: Answered) -> "_Played":
        """What the step was; raises Refused for an action that no policy could have taken."""
        answer, taken, request = answered.answer, turn.taken, turn.request
        loaded = turn.choice.loaded if answer is None else answer.loaded
        if taken is None and answer is not None:
            unlearned_mask = request.action_mask and not (self._learning and self._learning.takes_masks)
            drawn = not (answered.fallback or request.deterministic or unlearned_mask)
            return _Played(loaded, answer.action, float(answer.log_prob[0]) if drawn else None)
        if loaded is None:
            return _Played(None, answered.action, None)
        action = answered.action if taken is None else taken
        try:
            action = {
                head.path: head.from_environment(action[head.path]) for head in loaded.policy.action_heads
            }
        except ValueError as error:
            if taken is not None:
                raise invalid(f"taken_action: {error}") from error
            # A fallback's, on the bounds that a squashed policy never reaches: the step is not learned from.
            action = {name: np.zeros_like(array) for name, array in action.items()}
        if taken is not None:
            _check_allowed(loaded.policy.action_heads, action, turn.question.masks)
        log_prob = (
            request.taken_log_prob if taken is not None and request.HasField("taken_log_prob") else None
        )
        return _Played(loaded, action, log_prob)

    def _reply(self, turn: Turn, answered: Answered) -> bytes:
        """Messages behind one another are one message."""
        episode, request = turn.episode, turn.request
        where = pb.ActReply(episode_id=episode.id, step=episode.trail.length).SerializeToString()
        if turn.taken is None:
            return self._desk.writer.encode(request, answered) + where
        version = 0 if turn.choice.loaded is None else turn.choice.loaded.version
        reply = self._desk.writer.reply_taken(request, answered, turn.taken, version)
        return reply.SerializeToString() + where

    def _record(self, turn: Turn, answered: Answered, played: "_Played") -> None:
        episode, now, loaded = turn.episode, self._now(), played.loaded
        episode.answers += 1
        episode.errors += bool(answered.fallback)
        episode.slow += answered.seconds > self._slow_s
        episode.not_finite += answered.not_finite
        episode.loaded = None if answered.fallback else loaded
        episode.version = 0 if loaded is None else loaded.version
        if answered.answer is not None:
            episode.state = answered.answer.state
        if self._learning is not None and episode.learned and loaded is not None:
            self._learning.step(episode, turn.question, played.action, played.log_prob, loaded, now)
            return
        episode.trail.skip(now)
        if self._learning is not None:
            count_not_learned(episode.unlearned_as, 1)


def _is_never_gone() -> bool:
    return False


def _tell(episode: Episode, said: bytes | Exception) -> None:
    """All who wait for the reply to the step, of whom some may have gone."""
    waiting, episode.waiting = episode.waiting or [], None
    for future in waiting:
        if future.done():
            continue
        if isinstance(said, bytes):
            future.set_result(said)
        else:
            future.set_exception(said)


def _check_turn(episode: Episode, request: pb.ActRequest) -> None:
    if episode.waiting is not None:
        raise invalid("an Act of this episode is under way; wait for its reply")
    if request.request_id and request.request_id in episode.acted:
        raise invalid(f"request_id={request.request_id!r} was used for an earlier step; make a new one")
    if request.HasField("step") and request.step != episode.trail.length:
        raise invalid(f"step={request.step}: the next step is {episode.trail.length}")
    if request.batch or request.version:
        raise invalid("batch, version: an episode takes one observation at a time, from its own arm")


@dataclass(frozen=True, slots=True)
class _Played:
    """action: as the policy would have drawn it. log_prob: None where the policy did not draw it."""

    loaded: Loaded | None
    action: Row
    log_prob: float | None


def _check_allowed(
    heads: Sequence[ActionHead], action: Mapping[str, Any], masks: Mapping[str, NDArray[np.bool_]] | None
) -> None:
    """Raise Refused for an action, as drawn, that its own mask forbids."""
    for head in heads:
        if masks is None or head.path not in masks:
            continue
        if not all(head.allows(action[head.path][0], masks[head.path][0])):
            raise invalid(
                f"taken_action: {head.path} is one that action_mask forbids; send the mask that held"
            )
