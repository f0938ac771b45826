"""Requests of an episode: each counts once, in its order, however often it is sent.

    StartEpisode ─► Act(0) ─► Act(1) ─► … ─► EndEpisode         Reward(step) at any time

A step happens in one piece, after its answer and before its reply: a caller that hangs up, runs out of time or is
refused finds the episode as it was, or finds the very reply that it lost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from actor.serving.answering import Loaded, Question
from actor.serving.desk import Answered, Desk
from actor.serving.encoding import ARMS
from actor.serving.episodes import Episode, Episodes
from actor.serving.learning import Learning
from actor.serving.leaves import invalid
from actor.serving.served_outbox import count_not_learned
from actor.serving.shelf import Choice
from actor.serving.trail import Row
from actor.serving.trial import Trial
from penstock.policy.distributions import ActionHead
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.wire.refusal import Reason, Refusal, Refused

_LARGEST: Final = float(np.finfo(np.float32).max)
MOST_LOG_PROB: Final = 60.0
"""Whose exponential the learner can divide by in float32."""
MAX_REWARDS: Final = 1024
"""In one call."""

Feedback = Callable[[Sequence[tuple[str, int, float]]], Awaitable[None]]
"""Keeps rewards (episode id, step, amount) that came too late."""


class EpisodeDesk:
    """One event loop uses it."""

    def __init__(
        self,
        desk: Desk,
        episodes: Episodes,
        learning: Learning | None,
        feedback: Feedback | None,
        trial: Trial,
        slow_s: float,
    ) -> None:
        """learning: None where nothing is learned from. slow_s: an answer that takes longer is slow."""
        self._desk, self._episodes, self._learning = desk, episodes, learning
        self._feedback, self._trial, self._slow_s = feedback, trial, slow_s
        self._now = asyncio.get_running_loop().time
        self._keeping = asyncio.Lock()

    # ------------------------------------------------------------ start

    def start(self, request: pb.StartEpisodeRequest) -> pb.StartEpisodeReply:
        """A new episode, or the one that this request has started before; raises Refused."""
        self._desk.check_call(request.policy, request.request_id)
        episode = self._episodes.started_by(request.client_key, request.request_id)
        if episode is None:
            arm = self._desk.shelf.choose(request.client_key).arm
            learned = self._learning is not None and arm is Arm.LATEST and not request.not_learned
            episode = self._episodes.start(
                request.client_key, request.request_id, arm, learned=learned, now_s=self._now()
            )
            self._trial.begin(episode)
            episode.unlearned_as = "unasked" if request.not_learned else "arm"
            metrics.EPISODES_OPEN.set(len(self._episodes))
        return pb.StartEpisodeReply(episode_id=episode.id, arm=ARMS[episode.arm], learned=episode.learned)

    # ------------------------------------------------------------ act

    async def act(self, request: pb.ActRequest, until_s: float) -> pb.ActReply:
        """The next step, or the reply that this request was given before; raises Refused."""
        self._desk.check_call(request.policy, request.request_id)
        episode = self._episodes.find(request.episode_id, self._now())
        if request.request_id and request.request_id == episode.last_request:
            if episode.pending is not None:
                return await asyncio.shield(episode.pending)
            if episode.last_reply is not None:
                return episode.last_reply
        self._check_turn(episode, request)
        episode.last_request, episode.last_reply = request.request_id, None
        # Not the caller's task: it may hang up, and come again for the reply.
        episode.pending = asyncio.create_task(self._step(episode, request, until_s))
        episode.pending.add_done_callback(lambda _done: _forget_pending(episode))
        return await asyncio.shield(episode.pending)

    def _check_turn(self, episode: Episode, request: pb.ActRequest) -> None:
        if episode.pending is not None:
            raise invalid("an Act of this episode is under way; wait for its reply")
        if request.request_id and request.request_id in episode.acted:
            raise invalid(f"request_id={request.request_id!r} was used for an earlier step; make a new one")
        if request.HasField("step") and request.step != episode.trail.length:
            raise invalid(f"step={request.step}: the next step is {episode.trail.length}")
        if request.batch or request.version:
            raise invalid("batch, version: an episode takes one observation at a time, from its own arm")

    async def _step(self, episode: Episode, request: pb.ActRequest, until_s: float) -> pb.ActReply:
        question = self._desk.read(request)
        question.observation = {**question.observation, **episode.state}
        reward = _check_reward(episode, request)
        choice = self._choose(episode)
        taken = self._read_taken(request)
        if taken is None or question.distribution or question.value or self._desk.remembers:
            answered = await self._desk.answer(choice, question, until_s)
        else:
            answered = Answered(arm=episode.arm, action=taken, answer=None, fallback="", seconds=0.0)
        played = self._play(request, choice, answered, taken, question)
        if episode.ending is not None:
            raise Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail="the episode has ended meanwhile"))
        # From here on nothing fails: the step has happened.
        if reward is not None:
            self._add_reward(episode, episode.trail.length - 1, reward)
        reply = self._desk.reply(request, answered)
        if taken is not None:
            self._replace_action(reply, request, choice, taken)
        reply.episode_id, reply.step = episode.id, episode.trail.length
        self._record(episode, answered, question, played)
        episode.last_reply = reply
        if request.request_id:
            episode.acted.append(request.request_id)
        return reply

    def _choose(self, episode: Episode) -> Choice:
        """Newer weights only where a segment begins."""
        shelf, loaded = self._desk.shelf, episode.loaded
        if loaded is None or episode.trail.is_due(self._now()):
            return shelf.follow(episode.arm, episode.client_key)
        return Choice(episode.arm, loaded, False, shelf.shadow_of(loaded))

    def _play(
        self,
        request: pb.ActRequest,
        choice: Choice,
        answered: Answered,
        taken: Row | None,
        question: Question,
    ) -> "_Played":
        """What the step was; raises Refused for an action that no policy could have taken."""
        answer = answered.answer
        loaded = choice.loaded if answer is None else answer.loaded
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
            _check_allowed(loaded.policy.action_heads, action, question.masks)
        log_prob = (
            request.taken_log_prob if taken is not None and request.HasField("taken_log_prob") else None
        )
        return _Played(loaded, action, log_prob)

    def _read_taken(self, request: pb.ActRequest) -> Row | None:
        if not request.taken_action:
            return None
        if request.HasField("taken_log_prob") and not abs(request.taken_log_prob) <= MOST_LOG_PROB:
            text = f"taken_log_prob={request.taken_log_prob}: must be finite, and within ±{MOST_LOG_PROB:g}"
            raise invalid(f"{text}: what is as unlikely as that teaches nothing but overflow")
        return self._desk.action.read("taken_action", request.taken_action, 0)

    def _replace_action(self, reply: pb.ActReply, request: pb.ActRequest, choice: Choice, taken: Row) -> None:
        del reply.action[:], reply.log_prob[:]
        reply.action.extend(self._desk.action.write(taken, 0))
        if request.HasField("taken_log_prob"):
            reply.log_prob.append(request.taken_log_prob)
        reply.version = 0 if choice.loaded is None else choice.loaded.version

    def _record(self, episode: Episode, answered: Answered, question: Question, played: "_Played") -> None:
        """The step has happened."""
        now, loaded = self._now(), played.loaded
        episode.answers += 1
        episode.errors += bool(answered.fallback)
        episode.slow += answered.seconds > self._slow_s
        episode.not_finite += answered.not_finite
        episode.loaded = None if answered.fallback else loaded
        episode.version = 0 if loaded is None else loaded.version
        if answered.answer is not None:
            episode.state = answered.answer.state
        if self._learning is not None and episode.learned and loaded is not None:
            self._learning.step(episode, question, played.action, played.log_prob, loaded, now)
            return
        episode.trail.skip(now)
        if self._learning is not None:
            count_not_learned(episode.unlearned_as, 1)

    # ------------------------------------------------------------ reward

    async def reward(self, request: pb.RewardRequest) -> pb.RewardReply:
        """Add rewards, once; raises Refused when none of them was taken."""
        self._desk.check_call("", request.request_id)
        episode = self._episodes.find_any(request.episode_id)
        if episode is not None and request.request_id in episode.rewarded:
            return pb.RewardReply(late=episode.rewarded[request.request_id])
        amounts = _read_rewards(episode, request)
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
                self._add_reward(episode, step, amount)
            episode.remember_reward(request.request_id, late)
        return pb.RewardReply(late=late)

    def _is_late(self, episode: Episode | None, step: int) -> bool:
        if episode is None:
            return True
        return (episode.learned or episode.ending is not None) and episode.segment_of(step) is None

    async def _keep(self, episode_id: str, late: Sequence[tuple[int, float]]) -> None:
        if self._feedback is None:
            raise invalid(
                f"step={late[0][0]}: its reward came after the step was sent to the learner "
                "(serving.reward_window_s), and there is no registry whose feedback table keeps it"
            )
        await self._feedback([(episode_id, step, amount) for step, amount in late])
        metrics.FEEDBACK.inc(len(late))

    def _add_reward(self, episode: Episode, step: int, amount: float) -> None:
        episode.is_rewarded = True
        segment = episode.segment_of(step)
        if segment is not None:
            segment.add_reward(step, amount)
        if episode.ending is None:
            episode.total_return += amount

    # ------------------------------------------------------------ end

    def end(self, request: pb.EndEpisodeRequest) -> pb.EndEpisodeReply:
        """The episode is over; the same reply when it is said again; raises Refused."""
        self._desk.check_call("", request.request_id)
        known = self._episodes.find_any(request.episode_id)
        if (
            known is not None
            and known.ending is not None
            and known.ending_request == request.request_id != ""
        ):
            return known.ending
        episode = self._episodes.find(request.episode_id, self._now())
        if episode.pending is not None:
            raise invalid("an Act of this episode is under way; wait for its reply")
        final = self._read_end(request)
        reward = _check_reward(episode, request)
        if reward is not None:
            self._add_reward(episode, episode.trail.length - 1, reward)
        if request.ending == pb.ENDING_ABANDONED:
            self.abandon(episode)
        else:
            if self._learning is not None and episode.learned:
                self._learning.end(
                    episode, terminated=request.ending == pb.ENDING_TERMINATED, final=final, now_s=self._now()
                )
            self._close(episode)
        episode.ending_request = request.request_id
        assert episode.ending is not None
        return episode.ending

    def _read_end(self, request: pb.EndEpisodeRequest) -> Row | None:
        if request.ending not in (pb.ENDING_TERMINATED, pb.ENDING_TRUNCATED, pb.ENDING_ABANDONED):
            raise invalid(f"ending={request.ending}: say TERMINATED, TRUNCATED or ABANDONED")
        if request.final_observation:
            return self._desk.observation.read("final_observation", request.final_observation, 0)
        if request.ending == pb.ENDING_TRUNCATED:
            raise invalid("final_observation: a truncated episode is valued by it; send it")
        return None

    def abandon(self, episode: Episode) -> None:
        """Nobody will say how it went on."""
        if self._learning is not None and episode.learned:
            self._learning.give_up(episode, self._now())
        self._close(episode, is_whole=False)

    def _close(self, episode: Episode, *, is_whole: bool = True) -> None:
        episode.ending = pb.EndEpisodeReply(total_return=episode.total_return, length=episode.trail.length)
        self._trial.end(episode, is_whole=is_whole)
        metrics.ARM_RETURN.labels(episode.arm).observe(episode.total_return)
        self._episodes.close(episode)
        metrics.EPISODES_OPEN.set(len(self._episodes))

    def sweep(self) -> None:
        """Give up who was not heard of, and send what has ripened."""
        now = self._now()
        for episode in self._episodes.overdue(now):
            if episode.pending is None:
                self.abandon(episode)
        if self._learning is not None:
            self._learning.ripen(now)


def _forget_pending(episode: Episode) -> None:
    task, episode.pending = episode.pending, None
    if task is not None and not task.cancelled():
        task.exception()  # whoever waited has been told; nobody may wait


def _check_reward(episode: Episode, request: Any) -> float | None:
    """The reward of the step before that an Act or EndEpisode carries."""
    if not request.HasField("reward"):
        return None
    if episode.trail.length == 0:
        raise invalid(f"reward={request.reward}: there was no step before")
    return _finite(request.reward)


def _finite(amount: float) -> float:
    if not abs(amount) <= _LARGEST:
        raise invalid(f"reward={amount}: must be finite as a 32-bit number")
    return amount


def _read_rewards(episode: Episode | None, request: pb.RewardRequest) -> list[tuple[int, float]]:
    if not 1 <= len(request.rewards) <= MAX_REWARDS:
        raise invalid(f"rewards: {len(request.rewards)} in one call, send 1 to {MAX_REWARDS}")
    length = None if episode is None else episode.trail.length
    amounts = []
    for reward in request.rewards:
        if not reward.HasField("step") and not length:
            raise invalid("rewards.step: absent, and no newest step is known; name it")
        step = reward.step if reward.HasField("step") else (length or 0) - 1
        if length is not None and step >= length:
            raise invalid(f"rewards.step={step}: the episode has {length} steps")
        amounts.append((step, _finite(reward.amount)))
    return amounts


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
