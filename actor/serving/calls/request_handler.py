"""Requests without an episode, and the parts that requests with one share.

read ─► choose a version ─► ask, or fall back ─► write the reply
codec      versions            versions             codec
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.actor.serving.codec.requests import ARMS, ReplyWriter, RequestReader
from penstock.actor.serving.episodes.episodes import Episode, Episodes, Row
from penstock.actor.serving.experience.recorder import Learning, count_not_learned
from penstock.actor.serving.inference.batcher import Answer, Batcher, Loaded, Question
from penstock.actor.serving.release.canary_monitor import CanaryMonitor
from penstock.actor.serving.versions.answering import (
    Answered,
    Answerer,
    Asked,
    Fallback,
    OnAnswer,
    Shadow,
    ShadowRecord,
)
from penstock.actor.serving.versions.loaded_versions import Choice, LoadedVersions
from penstock.config.settings import ServingSection
from penstock.policy.acting.drawing import Drawing
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.protocol.spaces import Dict, Space
from penstock.registry.routing import Arm
from penstock.rpc.identity import CALLER
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.v1 import refusal_pb2

# ---- What could not be answered, counted, and in the log under the request's id.

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class RequestErrors:
    """Counts and logs what one server refuses; `clock`: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}
        """By kind: when it was said last, and how many have come since."""

    def refused(self, request: Any, error: Refused) -> refusal_pb2.Refusal:
        """Count a request of any call that was refused; return the refusal for its reply."""
        reason = error.refusal.reason.label
        metrics.REFUSALS.labels(reason).inc()
        others = self._count(reason)
        if others is not None:
            detail = error.refusal.logged or error.refusal.detail
            words = {"reason": reason, "detail": detail, "others": others}
            log.info("refused", extra=words | _names(request))
        return error.refusal.to_proto()

    def failed(self, loaded: Loaded, question: Question, error: Exception) -> None:
        """Count a version that could not answer."""
        others = self._count("failed")
        if others is not None:
            words = {"version": loaded.version, "error": str(error), "others": others}
            log.error("a version cannot answer", exc_info=error, extra=words | _names(question))

    def _count(self, kind: str) -> int | None:
        """Return how many went unsaid before this one; None where it goes unsaid, too."""
        now = self._clock()
        said_s, others = self._said.get(kind, (now - EVERY_S, 0))
        is_due = now - said_s >= EVERY_S
        self._said[kind] = (now, 0) if is_due else (said_s, others + 1)
        return others if is_due else None


def _names(request: Any) -> dict[str, str]:
    """The caller's own id of it, and its episode, as far as it has them."""
    names = {
        "client_request_id": getattr(request, "request_id", ""),
        "episode_id": getattr(request, "episode_id", ""),
    }
    return {key: name[:80] for key, name in names.items() if name}


class RequestHandler:
    """Used by one event loop."""

    def __init__(
        self,
        section: ServingSection,
        spaces: tuple[Space, Space, Dict],
        loaded_versions: LoadedVersions,
        batcher: Batcher,
        record: ShadowRecord | None,
        on_unanswered: Callable[[Answered], None],
    ) -> None:
        """spaces: of observations, of actions, and of what the policy remembers. record: see `Shadow`.

        on_unanswered: see `Answerer`.

        Raises ConfigurationError for a declared fallback that is no action of the space.
        """
        observation, action, state = spaces
        self.reader = RequestReader(section, observation, action, state)
        self.writer = ReplyWriter(action, state)
        self.loaded_versions = loaded_versions
        self.request_errors = RequestErrors()
        fallback, self.shadow = Fallback(section, action), Shadow(batcher, record)
        self.answerer = Answerer(
            loaded_versions, batcher, fallback, self.shadow, self.request_errors.failed, on_unanswered
        )

    async def act(self, request: pb.ActRequest, until_s: float) -> Answered:
        """Answer a request without an episode; raises Refused. until_s: by the clock of the event loop."""
        question = self.reader.read(request)
        if request.version:
            choice = await self.loaded_versions.exactly(request.version)
        else:
            choice = self.loaded_versions.choose(request.client_key)
        return await self.answerer.answer(choice, question, until_s)

    async def act_plain(self, question: Question, until_s: float) -> Answered:
        """Answer a plain request's question as `act` does; raises Refused."""
        return await self.answerer.answer(self.loaded_versions.choose(""), question, until_s)

    def ask(
        self, request: pb.ActRequest, until_s: float, on_answer: OnAnswer, is_gone: Callable[[], bool]
    ) -> None:
        """Ask for a request with neither episode nor version, without waiting; raises Refused.

        on_answer, is_gone: see `Answerer.ask`.
        """
        question = self.reader.read(request)
        self.answerer.ask(
            self.loaded_versions.choose(request.client_key), question, until_s, on_answer, is_gone
        )


# ---- Rewards in requests: which steps they are for, each checked before any of them counts.

MAX_REWARDS: Final = 1024
"""In one call."""
_LARGEST: Final = float(np.finfo(np.float32).max)


def of_step_before(episode: Episode, request: Any) -> float | None:
    """The reward of the step before that an Act or EndEpisode carries; raises Refused."""
    if not request.HasField("reward"):
        return None
    if episode.segment_builder.length == 0:
        raise invalid(f"reward={request.reward}: there was no step before")
    return check_amount(request.reward)


def of_steps(episode: Episode | None, request: Any) -> list[tuple[int, float]]:
    """Steps and amounts of a RewardRequest; raises Refused. episode: None where it is forgotten."""
    check_count(len(request.rewards))
    length = None if episode is None else episode.segment_builder.length
    amounts = []
    for reward in request.rewards:
        if not reward.HasField("step") and not length:
            raise invalid("rewards.step: absent, and no newest step is known; name it")
        step = reward.step if reward.HasField("step") else (length or 0) - 1
        if length is not None and step >= length:
            raise invalid(f"rewards.step={step}: the episode has {length} steps")
        if step > MAX_NUMBER:
            raise invalid(f"rewards.step={step}: no episode has more than {MAX_NUMBER} steps")
        amounts.append((step, check_amount(reward.amount)))
    return amounts


def check_count(count: int) -> None:
    """Raise Refused (INVALID) unless so many rewards may come in one call."""
    if not 1 <= count <= MAX_REWARDS:
        raise invalid(f"rewards: {count} in one call, send 1 to {MAX_REWARDS}")


def check_amount(amount: float) -> float:
    """Return the amount; raises Refused (INVALID) where it is not finite as a 32-bit number."""
    if not abs(amount) <= _LARGEST:
        raise invalid(f"reward={amount}: must be finite as a 32-bit number")
    return amount


# ---- Episodes from start to end, and the rewards of their steps.

Feedback = Callable[[str, Sequence[tuple[str, int, float]]], Awaitable[None]]
"""Keeps rewards (episode id, step, amount) of a caller that came too late."""


class EpisodeRequests:
    """One event loop uses it."""

    def __init__(
        self,
        handler: RequestHandler,
        episodes: Episodes,
        learning: Learning | None,
        feedback: Feedback | None,
        canary_monitor: CanaryMonitor,
        now: Callable[[], float],
    ) -> None:
        """learning: None where nothing is learned from. now: seconds, monotonic."""
        self._handler, self._episodes, self._learning = handler, episodes, learning
        self._feedback, self._canary_monitor, self._now = feedback, canary_monitor, now
        self._keeping = asyncio.Lock()

    # ------------------------------------------------------------ start

    def start(self, request: pb.StartEpisodeRequest) -> pb.StartEpisodeReply:
        """Return a new episode, or the one that this request has started before; raises Refused."""
        self._handler.reader.check_call(request.policy, request.request_id)
        episode = self._episodes.started_by(request.client_key, request.request_id)
        if episode is None:
            arm = self._handler.loaded_versions.choose(request.client_key).arm
            learned = self._learning is not None and arm is Arm.LATEST and not request.not_learned
            episode = self._episodes.start(
                request.client_key, request.request_id, arm, learned=learned, now_s=self._now()
            )
            self._canary_monitor.begin(episode)
            episode.unlearned_as = "unasked" if request.not_learned else "arm"
            metrics.EPISODES_OPEN.set(len(self._episodes))
        return pb.StartEpisodeReply(episode_id=episode.id, arm=ARMS[episode.arm], learned=episode.learned)

    # ------------------------------------------------------------ reward

    async def reward(self, request: pb.RewardRequest) -> pb.RewardReply:
        """Add rewards, once; raises Refused when none of them was taken."""
        self._handler.reader.check_call("", request.request_id)
        episode = self._episodes.find_any(request.episode_id)
        if episode is not None and request.request_id in episode.rewarded:
            return pb.RewardReply(late=episode.rewarded[request.request_id])
        amounts = of_steps(episode, request)
        late = [(step, amount) for step, amount in amounts if self._is_late(episode, step)]
        if not late:
            return self._book(episode, request, amounts, 0)
        async with self._keeping:
            # The same request may have come again while the first was being kept.
            if episode is None or request.request_id not in episode.rewarded:
                await self._keep(request.episode_id, late)
                return self._book(episode, request, amounts, len(late))
        return pb.RewardReply(late=episode.rewarded[request.request_id])

    def _book(
        self,
        episode: Episode | None,
        request: pb.RewardRequest,
        amounts: Sequence[tuple[int, float]],
        late: int,
    ) -> pb.RewardReply:
        if episode is not None:
            for step, amount in amounts:
                episode.add_reward(step, amount)
            episode.remember_reward(request.request_id, late)
        return pb.RewardReply(late=late)

    def _is_late(self, episode: Episode | None, step: int) -> bool:
        if episode is None:
            return True
        return (episode.learned or episode.is_over) and episode.segment_of(step) is None

    async def _keep(self, episode_id: str, late: Sequence[tuple[int, float]]) -> None:
        if self._feedback is None:
            raise invalid(
                f"step={late[0][0]}: its reward came after the step was sent to the learner "
                "(serving.reward_window_s), and there is no registry whose feedback table keeps it"
            )
        caller = CALLER.get()
        name = "" if caller is None else str(caller)
        await self._feedback(name, [(episode_id, step, amount) for step, amount in late])
        metrics.FEEDBACK.inc(len(late))

    # ------------------------------------------------------------ end

    def end(self, request: pb.EndEpisodeRequest) -> pb.EndEpisodeReply:
        """End the episode; returns the same reply when it is ended again. Raises Refused."""
        self._handler.reader.check_call("", request.request_id)
        known = self._episodes.find_any(request.episode_id)
        if known is not None and known.is_over and known.ending_request == request.request_id != "":
            return _ended(known)
        episode = self._episodes.find(request.episode_id, self._now())
        if episode.waiting is not None:
            raise invalid("an Act of this episode is under way; wait for its reply")
        final = self._read_end(request)
        reward = of_step_before(episode, request)
        if reward is not None:
            episode.add_reward(episode.segment_builder.length - 1, reward)
        if request.ending == pb.ENDING_ABANDONED:
            self.abandon(episode)
        else:
            if self._learning is not None and episode.learned:
                self._learning.end(
                    episode, terminated=request.ending == pb.ENDING_TERMINATED, final=final, now_s=self._now()
                )
            self._close(episode)
        episode.ending_request = request.request_id
        return _ended(episode)

    def _read_end(self, request: pb.EndEpisodeRequest) -> Row | None:
        if request.ending not in (pb.ENDING_TERMINATED, pb.ENDING_TRUNCATED, pb.ENDING_ABANDONED):
            raise invalid(f"ending={request.ending}: say TERMINATED, TRUNCATED or ABANDONED")
        if request.final_observation:
            return self._handler.reader.read_final(request.final_observation)
        if request.ending == pb.ENDING_TRUNCATED:
            raise invalid("final_observation: a truncated episode is valued by it; send it")
        return None

    def abandon(self, episode: Episode) -> None:
        """Give an episode up: how it went on will not be reported."""
        if self._learning is not None and episode.learned:
            self._learning.give_up(episode, self._now())
        self._close(episode, is_whole=False)

    def _close(self, episode: Episode, *, is_whole: bool = True) -> None:
        episode.is_over = True
        self._canary_monitor.end(episode, is_whole=is_whole)
        metrics.ARM_RETURN.labels(episode.arm).observe(episode.total_return)
        self._episodes.close(episode)
        metrics.EPISODES_OPEN.set(len(self._episodes))

    def sweep(self) -> None:
        """Give up episodes whose client is silent, and send what has ripened."""
        now = self._now()
        for episode in self._episodes.overdue(now):
            if episode.waiting is None:
                self.abandon(episode)
        if self._learning is not None:
            self._learning.ripen(now)


def _ended(episode: Episode) -> pb.EndEpisodeReply:
    return pb.EndEpisodeReply(total_return=episode.total_return, length=episode.segment_builder.length)


# ---- Acts of an episode: each is one step, however often it is sent.


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
