"""The one path of every request of Act and ActStream, the other calls of episodes, and what was not answered.

read ─► choose a version ─► ask it, or fall back ─► the episode takes its step ─► reply
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.actor.serving.batcher import (
    Answer,
    Answered,
    Batcher,
    Loaded,
    NotFinite,
    PendingQuestion,
    Question,
)
from penstock.actor.serving.episodes import Episode, Episodes, Row
from penstock.actor.serving.experience import Learning, count_not_learned
from penstock.actor.serving.fallback import FALLBACKS, Fallback
from penstock.actor.serving.loaded_versions import Choice, LoadedVersions
from penstock.actor.serving.release import CanaryMonitor
from penstock.actor.serving.requests import (
    ARMS,
    ReplyWriter,
    RequestReader,
    check_amount,
    check_count,
    reward_of_step_before,
)
from penstock.actor.serving.shadow import Shadow, ShadowRecord
from penstock.config.settings import ServingSection
from penstock.policy.acting.drawing import Drawing
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.protocol.spaces import Dict, Space
from penstock.registry.routing import Arm
from penstock.rpc.gate import Context
from penstock.rpc.identity import CALLER
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.v1 import refusal_pb2

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class RequestErrors:
    """Counts and logs the requests that one server refuses. clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """By kind: the time of its last log line, and how many were not logged since."""

    def refused(self, request: Any, error: Refused) -> refusal_pb2.Refusal:
        """Count a request of any call that was refused; return the refusal for its reply."""
        reason = error.refusal.reason.label
        metrics.REFUSALS.labels(reason).inc()
        others = self._count(reason)
        if others is not None:
            detail = error.refusal.logged or error.refusal.detail
            words = {"reason": reason, "detail": detail, "others": others}
            log.info("refused", extra=words | _ids_of(request))
        return error.refusal.to_proto()

    def refusing(self, label: str, reply: Any, body: Any) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return a call that counts itself under `label` and replies with the reason where `body` refuses."""
        count = metrics.POLICY_CALLS.labels(label).inc

        async def call(request: Any, _context: Context) -> Any:
            count()
            try:
                result = body(request)
                return await result if isinstance(result, Awaitable) else result
            except Refused as error:
                return reply(refusal=self.refused(request, error))

        return call

    def failed(self, loaded: Loaded, question: Question, error: Exception) -> None:
        others = self._count("failed")
        if others is not None:
            words = {"version": loaded.version, "error": str(error), "others": others}
            log.error("a version cannot answer", exc_info=error, extra=words | _ids_of(question))

    def _count(self, kind: str) -> int | None:
        """Return how many were not logged before this one; None where this one is not to be logged either."""
        now = self._clock()
        logged_s, others = self._logged.get(kind, (now - EVERY_S, 0))
        is_due = now - logged_s >= EVERY_S
        self._logged[kind] = (now, 0) if is_due else (logged_s, others + 1)
        return others if is_due else None


def _ids_of(request: Any) -> dict[str, str]:
    """Return the request id and the episode id, those that the request has."""
    names = {
        "client_request_id": getattr(request, "request_id", ""),
        "episode_id": getattr(request, "episode_id", ""),
    }
    return {key: name[:80] for key, name in names.items() if name}


# ---- Answers of versions.

OnAnswer = Callable[[Answered | Exception], None]
"""Takes the answer, Refused, or an error that was not foreseen; raises nothing."""


@dataclass(slots=True, eq=False)
class _ClientQuestion(PendingQuestion):
    """A client's question, and the choice that was made for it."""

    choice: Choice
    on_answer: OnAnswer


class Answerer:
    """Asks the chosen version, and answers with the declared fallback where it cannot answer.

        choice ─► ask (one forward pass for many) ─► Answered ─► the shadow, if there is one, afterwards
                      └─ cannot answer ─► fall back: the version before it, else the declared action

    Questions come in as arrays and leave as arrays. Used by one event loop; times `until_s` are seconds of
    that loop's clock.
    """

    def __init__(
        self,
        loaded_versions: LoadedVersions,
        batcher: Batcher,
        fallback: Fallback,
        shadow: Shadow,
        request_errors: RequestErrors,
        canary_monitor: CanaryMonitor,
    ) -> None:
        self._loaded_versions, self._batcher = loaded_versions, batcher
        self._fallback, self._shadow = fallback, shadow
        self._request_errors, self._canary_monitor = request_errors, canary_monitor
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = {
            (arm, name): metrics.ANSWERS.labels(arm, name or "none").inc for arm in Arm for name in FALLBACKS
        }

    def ask(
        self,
        choice: Choice,
        question: Question,
        until_s: float,
        on_answer: OnAnswer,
        is_gone: Callable[[], bool],
    ) -> None:
        """Ask the chosen version, else the fallback, without waiting; raises Refused (OVERLOADED).

        on_answer: called once, with the pass or before this returns, unless the answer `is_gone`: unwanted.
        """
        now = self._loop.time()
        pending = _ClientQuestion(
            choice.loaded, question, until_s, now, self._take_result, is_gone, choice, on_answer
        )
        if choice.loaded is None:
            self._begin(self._fall_back(pending, None))
        else:
            self._batcher.put(pending)

    def ask_exactly(
        self,
        version: int,
        question: Question,
        until_s: float,
        on_answer: OnAnswer,
        is_gone: Callable[[], bool],
    ) -> None:
        """Ask a version by its number, as `ask` does; it is loaded first where it is not loaded."""

        async def load_and_ask() -> None:
            try:
                choice = await self._loaded_versions.exactly(version)
                self.ask(choice, question, until_s, on_answer, is_gone)
            except Exception as error:  # noqa: BLE001 - for the caller
                on_answer(error)

        self._begin(load_and_ask())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_result(self, pending: _ClientQuestion, result: Answer | Exception) -> None:
        if isinstance(result, Answer):
            try:
                pending.on_answer(self._complete(pending, result))
            except Exception as error:  # noqa: BLE001 - others share the pass
                pending.on_answer(error)
        elif isinstance(result, Refused):
            pending.on_answer(result)
        else:
            self._begin(self._fall_back(pending, result))

    def _complete(self, pending: _ClientQuestion, answer: Answer) -> Answered:
        """Turn the answer of the chosen version into the client's, and pass the question to the shadow."""
        choice = pending.choice
        if choice.is_previous:
            blames = choice.arm is Arm.CANARY
            return self._count_in(
                pending, Answered(choice.arm, answer.ready, answer, "previous", False, blames)
            )
        if choice.arm is not Arm.PINNED:
            self._loaded_versions.note_answered(choice.arm, answer.loaded)
        if choice.shadow is not None:
            self._shadow.compare(choice.shadow, choice.arm, pending.question, answer)
        return self._count_in(pending, Answered(choice.arm, answer.ready, answer, ""))

    async def _fall_back(self, pending: _ClientQuestion, error: Exception | None) -> None:
        """Answer in place of the chosen version, which failed with `error`; None: there was none."""
        try:
            pending.on_answer(await self._fallback_answer(pending, error))
        except Exception as refused:  # noqa: BLE001 - for the caller
            pending.on_answer(refused)

    async def _fallback_answer(self, pending: _ClientQuestion, error: Exception | None) -> Answered:
        """Raises Refused where the configuration names no fallback, or the time is over."""
        choice, not_finite = pending.choice, isinstance(error, NotFinite)
        if choice.loaded is not None and error is not None:
            self._request_errors.failed(choice.loaded, pending.question, error)
        answer = await self._other_answer(pending)
        is_to_blame = choice.arm is Arm.CANARY and answer is not None
        blame = {"not_finite": not_finite, "is_to_blame": is_to_blame}
        if answer is not None and self._fallback.is_previous:
            return self._count_in(pending, Answered(choice.arm, answer.ready, answer, "previous", **blame))
        try:
            name, action = self._fallback.draw(pending.question.rows)
        except Refused:
            self._canary_monitor.answered(Answered(choice.arm, {}, None, "none", **blame))
            raise
        return self._count_in(pending, Answered(choice.arm, action, None, name, **blame))

    async def _other_answer(self, pending: _ClientQuestion) -> Answer | None:
        """Return the answer of a version that could stand in; the active one's blames a canary."""
        choice = pending.choice
        others = (
            [self._loaded_versions.former(choice.arm, choice.loaded)] if self._fallback.is_previous else []
        )
        if choice.arm is Arm.CANARY:
            others.append(self._loaded_versions.active)
        for other in others:
            if other is None or other is choice.loaded:
                continue
            try:
                return await self._batcher.ask(other, pending.question, pending.until_s)
            except Refused:
                raise
            except Exception as error:  # noqa: BLE001 - counted and logged
                self._request_errors.failed(other, pending.question, error)
        return None

    def _count_in(self, pending: _ClientQuestion, answered: Answered) -> Answered:
        metrics.ANSWER_SECONDS.observe(self._loop.time() - pending.since_s)
        self._count[answered.arm, answered.fallback]()
        return answered


# ---- The calls.

OnReply = Callable[[bytes | Exception], None]
"""Takes the bytes of a reply, or an error that was not foreseen; raises nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step in progress. reward: of the step before. taken: the action that the caller chose, if any."""

    episode: Episode
    request: pb.ActRequest
    question: Question
    reward: float | None
    choice: Choice
    taken: Row | None


Feedback = Callable[[str, Sequence[tuple[str, int, float]]], Awaitable[None]]
"""Keeps rewards (episode id, step, amount) of a caller that came too late."""


class RequestHandler:
    """Answers requests for actions, and keeps the episodes of clients. Used by one event loop."""

    def __init__(
        self,
        section: ServingSection,
        spaces: tuple[Space, Space, Dict],
        loaded_versions: LoadedVersions,
        batcher: Batcher,
        record: ShadowRecord | None,
        episodes: Episodes,
        learning: Learning | None,
        feedback: Feedback | None,
        canary_monitor: CanaryMonitor,
        now: Callable[[], float],
    ) -> None:
        """spaces: of observations, of actions, and of what the policy remembers. record: see `Shadow`.

        learning: None where nothing is learned from. feedback: None where there is no registry. now: seconds,
        monotonic.

        Raises ConfigurationError for a declared fallback that is no action of the space.
        """
        observation, action, state = spaces
        self.reader = RequestReader(section, observation, action, state)
        self.writer = ReplyWriter(action, state)
        self.loaded_versions = loaded_versions
        self.request_errors = RequestErrors()
        fallback, self.shadow = Fallback(section, action), Shadow(batcher, record)
        self._canary_monitor, self._note_answered = canary_monitor, canary_monitor.answered
        self._answerer = Answerer(
            loaded_versions, batcher, fallback, self.shadow, self.request_errors, canary_monitor
        )
        self.episodes, self.learning = episodes, learning
        self._feedback, self._now = feedback, now
        self._keeping = asyncio.Lock()

    def act(
        self, request: pb.ActRequest, until_s: float, on_reply: OnReply, is_gone: Callable[[], bool]
    ) -> None:
        """Answer a request without waiting.

        until_s: by the clock of the event loop. on_reply: called once, perhaps before this returns.
        is_gone: whether the reply is no longer wanted; then `on_reply` need not be called.
        """
        try:
            if request.episode_id:
                self._begin_step(request, until_s, partial(self._reply, request, on_reply))
                return
            question = self.reader.read(request)
            on_answer = partial(self._answered, request, on_reply)
            if request.version:
                self._answerer.ask_exactly(request.version, question, until_s, on_answer, is_gone)
            else:
                choice = self.loaded_versions.choose(request.client_key)
                self._answerer.ask(choice, question, until_s, on_answer, is_gone)
        except Exception as error:  # noqa: BLE001 - for the caller
            self._reply(request, on_reply, error)

    def refuse(self, request: pb.ActRequest, error: Refused) -> bytes:
        refusal = self.request_errors.refused(request, error)
        return pb.ActReply(request_id=request.request_id, refusal=refusal).SerializeToString()

    def _answered(self, request: pb.ActRequest, on_reply: OnReply, result: Answered | Exception) -> None:
        if isinstance(result, Answered):
            self._note_answered(result)
            on_reply(self.writer.encode(request, result))
        else:
            self._reply(request, on_reply, result)

    def _reply(self, request: pb.ActRequest, on_reply: OnReply, result: bytes | Exception) -> None:
        on_reply(self.refuse(request, result) if isinstance(result, Refused) else result)

    # ------------------------------------------------------------ steps of episodes

    def _begin_step(self, request: pb.ActRequest, until_s: float, on_reply: OnReply) -> None:
        """Take the next step once, however often it is sent; raises Refused."""
        self.reader.check_call(request.policy, request.request_id)
        episode = self.episodes.find(request.episode_id, self._now())
        if request.request_id and request.request_id == episode.last_request:
            if episode.waiting is not None:
                episode.waiting.append(on_reply)
                return
            if episode.last_reply:
                on_reply(episode.last_reply)
                return
        _check_step(episode, request)
        step = self._read_step(episode, request)
        question, taken = step.question, step.taken
        episode.last_request, episode.last_reply, episode.waiting = request.request_id, b"", [on_reply]
        try:
            if taken is None or question.distribution or question.value or self.reader.remembers:
                # Whether its caller is there or not: it may come again for the reply.
                on_answer = partial(self._take_step, step)
                self._answerer.ask(step.choice, question, until_s, on_answer, lambda: False)
            else:
                self._take_step(step, Answered(episode.arm, taken, None, ""))
        except Exception:
            episode.waiting = None
            raise

    def _read_step(self, episode: Episode, request: pb.ActRequest) -> _Step:
        question = self.reader.read(request)
        if request.taken_version:
            if not request.taken_action:
                text = f"taken_version={request.taken_version}: give taken_action, which it drew"
                raise invalid(f"{text}, or leave it out")
            self.loaded_versions.update_of(request.taken_version)
        if episode.state:
            question = replace(question, observation={**question.observation, **episode.state})
        reward, taken = reward_of_step_before(episode, request), self.reader.read_taken(request)
        return _Step(episode, request, question, reward, self._choose(episode), taken)

    def _choose(self, episode: Episode) -> Choice:
        loaded = episode.loaded
        if loaded is None or episode.segment_builder.is_due(self._now()):
            return self.loaded_versions.follow(episode.arm, episode.client_key)
        return Choice(episode.arm, loaded, False, self.loaded_versions.shadow_of(loaded))

    def _take_step(self, step: _Step, result: Answered | Exception) -> None:
        """Take the step, or leave the episode as it was; every waiting call gets the reply."""
        episode = step.episode
        try:
            reply: bytes | Exception = self._step(step, result) if isinstance(result, Answered) else result
        except Exception as error:  # noqa: BLE001 - for the caller
            reply = error
        waiting, episode.waiting = episode.waiting or [], None
        for on_reply in waiting:
            on_reply(reply)

    def _step(self, step: _Step, answered: Answered) -> bytes:
        episode, request = step.episode, step.request
        loaded, action, log_prob = self._play(step, answered)
        if episode.is_over:
            raise Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail="the episode has ended meanwhile"))
        reply = self._write_step(step, answered)
        # From here on nothing fails: the step has happened.
        if step.reward is not None:
            episode.add_reward(episode.segment_builder.length - 1, step.reward)
        self._record(step, answered, loaded, action, log_prob)
        episode.last_reply = reply
        if request.request_id:
            episode.acted.append(request.request_id)
        return reply

    def _play(self, step: _Step, answered: Answered) -> tuple[Loaded | None, Row, float | None]:
        """Return version, action as that draws it, and its log-probability; None: it was not drawn.

        Raises Refused for an action that no policy could have taken.
        """
        answer, taken, request = answered.answer, step.taken, step.request
        loaded = step.choice.loaded if answer is None else answer.loaded
        if taken is None and answer is not None:
            unlearned_mask = request.action_mask and not (self.learning and self.learning.takes_masks)
            drawn = not (answered.fallback or request.deterministic or unlearned_mask)
            return loaded, answer.action, float(answer.log_prob[0]) if drawn else None
        if loaded is None:
            return None, answered.action, None
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
        if taken is None:
            return loaded, action, None
        _check_allowed(loaded.policy.action_heads, action, step.question.masks)
        if request.taken_version:
            drawn_by = self.loaded_versions.update_of(request.taken_version)
            loaded = replace(loaded, version=request.taken_version, update=drawn_by)
        return loaded, action, request.taken_log_prob if request.HasField("taken_log_prob") else None

    def _write_step(self, step: _Step, answered: Answered) -> bytes:
        """Concatenated messages are read as one message."""
        episode, request = step.episode, step.request
        where = pb.ActReply(episode_id=episode.id, step=episode.segment_builder.length).SerializeToString()
        if step.taken is None:
            return self.writer.encode(request, answered) + where
        version = 0 if step.choice.loaded is None else step.choice.loaded.version
        return self.writer.reply_taken(request, answered, step.taken, version).SerializeToString() + where

    def _record(
        self, step: _Step, answered: Answered, loaded: Loaded | None, action: Row, log_prob: float | None
    ) -> None:
        episode, now = step.episode, self._now()
        self._note_answered(answered)
        episode.loaded = None if answered.fallback else step.choice.loaded or loaded
        episode.version = 0 if loaded is None else loaded.version
        if answered.answer is not None:
            episode.state = answered.answer.state
        if self.learning is not None and episode.learned and loaded is not None:
            self.learning.step(episode, step.question, action, log_prob, loaded, now)
            return
        episode.segment_builder.skip(now)
        if self.learning is not None:
            count_not_learned(episode.unlearned_as, 1)

    # ------------------------------------------------------------ start

    def start(self, request: pb.StartEpisodeRequest) -> pb.StartEpisodeReply:
        """Return a new episode, or the one that this request has started before."""
        self.reader.check_call(request.policy, request.request_id)
        episode = self.episodes.started_by(request.client_key, request.request_id)
        if episode is None:
            arm = self.loaded_versions.choose(request.client_key).arm
            learned = self.learning is not None and arm is Arm.LATEST and not request.not_learned
            episode = self.episodes.start(
                request.client_key, request.request_id, arm, learned=learned, now_s=self._now()
            )
            self._canary_monitor.begin(episode)
            episode.unlearned_as = "unasked" if request.not_learned else "arm"
            metrics.EPISODES_OPEN.set(len(self.episodes))
        return pb.StartEpisodeReply(episode_id=episode.id, arm=ARMS[episode.arm], learned=episode.learned)

    # ------------------------------------------------------------ reward

    async def reward(self, request: pb.RewardRequest) -> pb.RewardReply:
        """Add rewards, once."""
        self.reader.check_call("", request.request_id)
        episode = self.episodes.find_any(request.episode_id)
        if episode is not None and request.request_id in episode.rewarded:
            return pb.RewardReply(late=episode.rewarded[request.request_id])
        amounts = rewards_of(episode, request)
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
        """End the episode; returns the same reply when it is ended again."""
        self.reader.check_call("", request.request_id)
        known = self.episodes.find_any(request.episode_id)
        if known is not None and known.is_over and known.ending_request == request.request_id != "":
            return _ended(known)
        episode = self.episodes.find(request.episode_id, self._now())
        if episode.waiting is not None:
            raise invalid("an Act of this episode is under way; wait for its reply")
        final = self._read_end(request)
        reward = reward_of_step_before(episode, request)
        if reward is not None:
            episode.add_reward(episode.segment_builder.length - 1, reward)
        if request.ending == pb.ENDING_ABANDONED:
            self.abandon(episode)
        else:
            if self.learning is not None and episode.learned:
                self.learning.end(
                    episode, terminated=request.ending == pb.ENDING_TERMINATED, final=final, now_s=self._now()
                )
            self._close(episode)
        episode.ending_request = request.request_id
        return _ended(episode)

    def _read_end(self, request: pb.EndEpisodeRequest) -> Row | None:
        if request.ending not in (pb.ENDING_TERMINATED, pb.ENDING_TRUNCATED, pb.ENDING_ABANDONED):
            raise invalid(f"ending={request.ending}: say TERMINATED, TRUNCATED or ABANDONED")
        if request.final_observation:
            return self.reader.read_final(request.final_observation)
        if request.ending == pb.ENDING_TRUNCATED:
            raise invalid("final_observation: the value of a truncated episode depends on it; send it")
        return None

    def abandon(self, episode: Episode) -> None:
        """Close an episode whose outcome will not be reported."""
        if self.learning is not None and episode.learned:
            self.learning.give_up(episode, self._now())
        self._close(episode, is_whole=False)

    def _close(self, episode: Episode, *, is_whole: bool = True) -> None:
        episode.is_over = True
        self._canary_monitor.end(episode, is_whole=is_whole)
        metrics.ARM_RETURN.labels(episode.arm).observe(episode.total_return)
        self.episodes.close(episode)
        metrics.EPISODES_OPEN.set(len(self.episodes))

    def sweep(self) -> None:
        """Give up episodes whose client is silent too long; send segments whose reward window is over."""
        now = self._now()
        for episode in self.episodes.overdue(now):
            if episode.waiting is None:
                self.abandon(episode)
        if self.learning is not None:
            self.learning.ripen(now)


def _check_step(episode: Episode, request: pb.ActRequest) -> None:
    if episode.waiting is not None:
        raise invalid("an Act of this episode is under way; wait for its reply")
    if request.request_id and request.request_id in episode.acted:
        raise invalid(f"request_id={request.request_id!r} was used for an earlier step; make a new one")
    if request.HasField("step") and request.step != episode.segment_builder.length:
        raise invalid(f"step={request.step}: the next step is {episode.segment_builder.length}")
    if request.batch or request.version:
        raise invalid("batch, version: an episode takes one observation at a time, from its own arm")


def _check_allowed(
    heads: Sequence[Drawing], action: Mapping[str, Any], masks: Mapping[str, NDArray[np.bool_]] | None
) -> None:
    """Raise Refused for an action, as drawn, that its own mask forbids."""
    for head in heads:
        if masks is None or head.path not in masks:
            continue
        if not all(head.allows(action[head.path][0], masks[head.path][0])):
            raise invalid(
                f"taken_action: {head.path} is one that action_mask forbids; send the mask of that step"
            )


def _ended(episode: Episode) -> pb.EndEpisodeReply:
    return pb.EndEpisodeReply(total_return=episode.total_return, length=episode.segment_builder.length)


def rewards_of(episode: Episode | None, request: Any) -> list[tuple[int, float]]:
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
