"""Acts of an episode: each is one step, however often it is sent.

    read ─► ask (one forward pass for many) ─► step ─► reply, to all who wait for it
       └─ somebody's own action: no pass ────────┘

A step happens in one piece, after its answer and before its reply: a caller that hangs up, runs out of time
or is refused finds the episode as it was, or finds the very reply that it lost.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.actor.serving.calls.request_handler import RequestHandler
from penstock.actor.serving.calls.step_rewards import of_step_before
from penstock.actor.serving.episodes.episodes import Episode, Episodes
from penstock.actor.serving.episodes.segments import Row
from penstock.actor.serving.experience.recorder import Learning
from penstock.actor.serving.experience.served_queue import count_not_learned
from penstock.actor.serving.inference.forward_pass import Answer, Loaded, Question
from penstock.actor.serving.versions.answering import Answered, Asked
from penstock.actor.serving.versions.loaded_versions import Choice
from penstock.policy.acting.drawing import Drawing
from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.v1 import policy_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeStep:
    """A step that is under way.

    reward: of the step before.   taken: what the caller does instead of asking.
    """

    episode: Episode
    request: pb.ActRequest
    question: Question
    reward: float | None
    choice: Choice
    taken: Row | None


class EpisodeSteps:
    """One event loop uses it; `now` in seconds, monotonic."""

    def __init__(
        self,
        handler: RequestHandler,
        episodes: Episodes,
        learning: Learning | None,
        on_answer: Callable[[Answered], None],
        now: Callable[[], float],
    ) -> None:
        """learning: None where nothing is learned from. on_answer: told of answers of versions."""
        self._handler, self._episodes, self._learning = handler, episodes, learning
        self._on_answer, self._now = on_answer, now
        self._loop = asyncio.get_running_loop()
        self._falling_back: set[asyncio.Task[None]] = set()

    async def act(self, request: pb.ActRequest, until_s: float) -> bytes:
        """The reply to the next step, or the one that this request was given before; raises Refused."""
        self._handler.reader.check_call(request.policy, request.request_id)
        episode = self._episodes.find(request.episode_id, self._now())
        mine: asyncio.Future[bytes] = self._loop.create_future()
        if request.request_id and request.request_id == episode.last_request:
            if episode.waiting is not None:
                episode.waiting.append(mine)
                return await mine
            if episode.last_reply:
                return episode.last_reply
        _check_step(episode, request)
        episode_step = self._read(episode, request)
        episode.last_request, episode.last_reply, episode.waiting = request.request_id, b"", [mine]
        try:
            self._begin(episode_step, until_s)
        except Exception:
            episode.waiting = None
            raise
        return await mine

    def _read(self, episode: Episode, request: pb.ActRequest) -> EpisodeStep:
        question = self._handler.reader.read(request)
        _check_taken_version(request, self._handler)
        if episode.state:
            question = replace(question, observation={**question.observation, **episode.state})
        reward, taken = of_step_before(episode, request), self._handler.reader.read_taken(request)
        return EpisodeStep(episode, request, question, reward, self._choose(episode), taken)

    def _choose(self, episode: Episode) -> Choice:
        """Newer weights only where a segment begins."""
        loaded_versions, loaded = self._handler.loaded_versions, episode.loaded
        if loaded is None or episode.segment_builder.is_due(self._now()):
            return loaded_versions.follow(episode.arm, episode.client_key)
        return Choice(episode.arm, loaded, False, loaded_versions.shadow_of(loaded))

    # ------------------------------------------------------------ the answer

    def _begin(self, episode_step: EpisodeStep, until_s: float) -> None:
        question, taken = episode_step.question, episode_step.taken
        if taken is None or question.distribution or question.value or self._handler.reader.remembers:
            # Whether its caller is there or not: it may come again for the reply.
            self._handler.answerer.ask(
                episode_step.choice, question, until_s, partial(self._answered, episode_step), _is_never_gone
            )
        else:
            arm = episode_step.episode.arm
            self._step(episode_step, Answered(arm=arm, action=taken, answer=None, fallback=""))

    def _answered(self, episode_step: EpisodeStep, asked: Asked, said: Answer | Exception | None) -> None:
        """The chosen version has answered, or has failed to."""
        try:
            if isinstance(said, Answer):
                self._step(episode_step, self._handler.answerer.complete(asked, said))
            elif isinstance(said, Refused):
                _resolve(episode_step.episode, said)
            else:
                task = self._loop.create_task(self._fall_back(episode_step, asked, said))
                self._falling_back.add(task)
                task.add_done_callback(self._falling_back.discard)
        except Exception as error:  # noqa: BLE001 - raised by `act`; others share the pass
            _resolve(episode_step.episode, error)

    async def _fall_back(self, episode_step: EpisodeStep, asked: Asked, error: Exception | None) -> None:
        try:
            self._step(episode_step, await self._handler.answerer.fall_back(asked, error))
        except Exception as refused:  # noqa: BLE001 - raised by `act`
            _resolve(episode_step.episode, refused)

    # ------------------------------------------------------------ the step

    def _step(self, episode_step: EpisodeStep, answered: Answered) -> None:
        """Take the step; the caller that waits for the reply gets it."""
        episode, request = episode_step.episode, episode_step.request
        played = self._play(episode_step, answered)
        if episode.is_over:
            raise Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail="the episode has ended meanwhile"))
        reply = self._reply(episode_step, answered)
        # From here on nothing fails: the step has happened.
        if episode_step.reward is not None:
            episode.add_reward(episode.segment_builder.length - 1, episode_step.reward)
        self._record(episode_step, answered, played)
        episode.last_reply = reply
        if request.request_id:
            episode.acted.append(request.request_id)
        _resolve(episode, reply)

    def _play(self, episode_step: EpisodeStep, answered: Answered) -> "_Played":
        """Return what the step was; raises Refused for an action that no policy could have taken."""
        answer, taken, request = answered.answer, episode_step.taken, episode_step.request
        loaded = episode_step.choice.loaded if answer is None else answer.loaded
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
            _check_allowed(loaded.policy.action_heads, action, episode_step.question.masks)
            if request.taken_version:
                drawn_by = self._handler.loaded_versions.update_of(request.taken_version)
                loaded = replace(loaded, version=request.taken_version, update=drawn_by)
        log_prob = (
            request.taken_log_prob if taken is not None and request.HasField("taken_log_prob") else None
        )
        return _Played(loaded, action, log_prob)

    def _reply(self, episode_step: EpisodeStep, answered: Answered) -> bytes:
        """Messages behind one another are one message."""
        episode, request = episode_step.episode, episode_step.request
        where = pb.ActReply(episode_id=episode.id, step=episode.segment_builder.length).SerializeToString()
        if episode_step.taken is None:
            return self._handler.writer.encode(request, answered) + where
        version = 0 if episode_step.choice.loaded is None else episode_step.choice.loaded.version
        reply = self._handler.writer.reply_taken(request, answered, episode_step.taken, version)
        return reply.SerializeToString() + where

    def _record(self, episode_step: EpisodeStep, answered: Answered, played: "_Played") -> None:
        episode, now, loaded = episode_step.episode, self._now(), played.loaded
        self._on_answer(answered)
        episode.loaded = None if answered.fallback else episode_step.choice.loaded or loaded
        episode.version = 0 if loaded is None else loaded.version
        if answered.answer is not None:
            episode.state = answered.answer.state
        if self._learning is not None and episode.learned and loaded is not None:
            self._learning.step(episode, episode_step.question, played.action, played.log_prob, loaded, now)
            return
        episode.segment_builder.skip(now)
        if self._learning is not None:
            count_not_learned(episode.unlearned_as, 1)


def _is_never_gone() -> bool:
    return False


def _resolve(episode: Episode, said: bytes | Exception) -> None:
    """Answer all callers that wait for the reply to the step; some may have gone."""
    waiting, episode.waiting = episode.waiting or [], None
    for future in waiting:
        if future.done():
            continue
        if isinstance(said, bytes):
            future.set_result(said)
        else:
            future.set_exception(said)


def _check_step(episode: Episode, request: pb.ActRequest) -> None:
    if episode.waiting is not None:
        raise invalid("an Act of this episode is under way; wait for its reply")
    if request.request_id and request.request_id in episode.acted:
        raise invalid(f"request_id={request.request_id!r} was used for an earlier step; make a new one")
    if request.HasField("step") and request.step != episode.segment_builder.length:
        raise invalid(f"step={request.step}: the next step is {episode.segment_builder.length}")
    if request.batch or request.version:
        raise invalid("batch, version: an episode takes one observation at a time, from its own arm")


def _check_taken_version(request: pb.ActRequest, handler: RequestHandler) -> None:
    if not request.taken_version:
        return
    if not request.taken_action:
        raise invalid(
            f"taken_version={request.taken_version}: give taken_action, which it drew, or leave it out"
        )
    handler.loaded_versions.update_of(request.taken_version)


@dataclass(frozen=True, slots=True)
class _Played:
    """action: as the policy would have drawn it. log_prob: None where the policy did not draw it."""

    loaded: Loaded | None
    action: Row
    log_prob: float | None


def _check_allowed(
    heads: Sequence[Drawing], action: Mapping[str, Any], masks: Mapping[str, NDArray[np.bool_]] | None
) -> None:
    """Raise Refused for an action, as drawn, that its own mask forbids."""
    for head in heads:
        if masks is None or head.path not in masks:
            continue
        if not all(head.allows(action[head.path][0], masks[head.path][0])):
            raise invalid(
                f"taken_action: {head.path} is one that action_mask forbids; send the mask that held"
            )
