"""Episodes of clients: their start, the rewards of their steps, their end. Act is `request_handler`'s."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.actor.serving.episodes import Episode, Episodes, Row
from penstock.actor.serving.experience import Learning
from penstock.actor.serving.loaded_versions import LoadedVersions
from penstock.actor.serving.release import CanaryMonitor
from penstock.actor.serving.requests import (
    ARMS,
    RequestReader,
    check_amount,
    check_count,
    reward_of_step_before,
)
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import invalid
from penstock.registry.routing import Arm
from penstock.rpc.identity import CALLER
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb

Feedback = Callable[[str, Sequence[tuple[str, int, float]]], Awaitable[None]]
"""Keeps rewards (episode id, step, amount) of a caller that came too late."""


class EpisodeRequests:
    """Its calls raise Refused. One event loop uses it."""

    def __init__(
        self,
        reader: RequestReader,
        loaded_versions: LoadedVersions,
        episodes: Episodes,
        learning: Learning | None,
        feedback: Feedback | None,
        canary_monitor: CanaryMonitor,
        now: Callable[[], float],
    ) -> None:
        """learning: None where nothing is learned from. now: seconds, monotonic."""
        self._reader, self._loaded_versions = reader, loaded_versions
        self._episodes, self._learning = episodes, learning
        self._feedback, self._canary_monitor, self._now = feedback, canary_monitor, now
        self._keeping = asyncio.Lock()

    # ------------------------------------------------------------ start

    def start(self, request: pb.StartEpisodeRequest) -> pb.StartEpisodeReply:
        """Return a new episode, or the one that this request has started before."""
        self._reader.check_call(request.policy, request.request_id)
        episode = self._episodes.started_by(request.client_key, request.request_id)
        if episode is None:
            arm = self._loaded_versions.choose(request.client_key).arm
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
        """Add rewards, once."""
        self._reader.check_call("", request.request_id)
        episode = self._episodes.find_any(request.episode_id)
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
        self._reader.check_call("", request.request_id)
        known = self._episodes.find_any(request.episode_id)
        if known is not None and known.is_over and known.ending_request == request.request_id != "":
            return _ended(known)
        episode = self._episodes.find(request.episode_id, self._now())
        if episode.waiting is not None:
            raise invalid("an Act of this episode is under way; wait for its reply")
        final = self._read_end(request)
        reward = reward_of_step_before(episode, request)
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
            return self._reader.read_final(request.final_observation)
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
