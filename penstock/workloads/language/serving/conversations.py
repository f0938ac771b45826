"""All conversations of a server, answers without a conversation, and columns on their way to the learner.

A finished column waits for late rewards (serving.reward_window_s), then goes to the learner as a fragment.
Tokens that are not learned from are answered all the same, and counted by reason:

    arm         the conversation follows a version that is not the learner's newest
    unasked     the client asked for no learning, or there is no conversation
    sampling    the request changed how tokens are drawn
    blocked     the guard blocked a part of the answer, and the run sets no penalty for that
    thought     a thought, or an answer behind one: only a known answer could reward it
    fallback    the model answered without its adapter
    sibling     the next messages continue another answer to the same messages
    stopped     the caller did not wait for the end of the answer
    abandoned   the caller did not report the outcome
    unrewarded  the conversation ended without any reward
    failed      the caller said that the conversation failed
    full, too_large, stale, lost   as those of a policy server
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.config.settings import ServingSection
from penstock.protocol.messages import Publication
from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.protocol.specification import RunSpecification
from penstock.registry.routing import Arm
from penstock.rpc.identity import CALLER, Identity
from penstock.runtime import metrics
from penstock.workloads.language.conversation import (
    ChatEncoder,
    Column,
    ColumnFragments,
    ForeignWord,
    LiveConversation,
    Sampled,
)
from penstock.workloads.language.serving.text_answerer import AdapterVersions, Question, Show, TextAnswerer
from penstock.workloads.language.serving.text_request import (
    BYTES_PER_TOKEN,
    SAMPLED_BYTES,
    OpenConversation,
    Sibling,
    TextAnswer,
    TextReply,
    TextRequest,
    check_client_key,
    request_bytes,
)
from penstock.workloads.plugin.fragments import HeaderFields, LearnerReward
from penstock.workloads.plugin.serving import (
    CallerShares,
    CanaryMonitor,
    Choice,
    Episode,
    Episodes,
    Opinion,
    RunFollower,
    SampleJournal,
    ServedQueue,
    check_amount,
    check_count,
    check_request_id,
    count_not_learned,
)

REASONS: Final = (
    *("arm", "unasked", "sampling", "blocked", "thought", "fallback", "sibling", "stopped"),
    *("abandoned", "unrewarded", "failed", "full", "too_large", "stale", "lost"),
)


class ColumnExperience:
    """Sends columns to the learner. Used by one event loop."""

    def __init__(
        self,
        specification: RunSpecification,
        section: ServingSection,
        follower: RunFollower,
        pad_id: int,
        reward: LearnerReward | None = None,
        journal: SampleJournal | None = None,
    ) -> None:
        """follower: its queue takes the fragments. journal: for the audit.

        Raises ConfigurationError for a run of other tensors.
        """
        self._run, self._policy = specification.run, section.policy
        self._queue = follower.queue = ServedQueue(section.outbox_fragments, specification.stale_after)
        self._on_queued, self._journal = follower.send_queued, journal
        self._bounds = specification.bounds()
        self._fragments = ColumnFragments(specification.schema, 1, pad_id, reward)
        for reason in REASONS:
            # A series that begins with its first event hides that event.
            count_not_learned(reason, 0)

    @property
    def most_reward(self) -> float:
        return self._bounds["reward"]

    def note_sampled(self, conversation: str, version: int, answers: Sequence[TextAnswer]) -> None:
        if self._journal is not None:
            self._journal.sampled(conversation, version, [one.ids for one in answers])

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def send(self, conversation: str, lane: int, column: Column) -> None:
        """Queue a column of a conversation for the learner, if there is room for it.

        lane: its slot, which the conversations of a lane use one after another.
        """
        tokens = sum(len(turn.log_prob) for turn in column.turns)
        if self._is_beyond(column):
            count_not_learned("too_large", tokens)
            return
        newest = column.turns[-1]
        fields = HeaderFields(
            run=self._run,
            session=0,
            sequence=0,
            weights=Publication(newest.version, newest.update),
            round=0,
            policy=self._policy,
        )
        fragment, episodes = self._fragments.cut([column], fields, first_slot=lane)
        if self._journal is not None:
            self._journal.sent(conversation, fragment)
        metrics.FRAGMENTS_BUILT.inc()
        if not self._queue.put(fragment):
            count_not_learned("full", tokens)
            return
        metrics.ENV_STEPS.inc(tokens)
        self._queue.episodes.extend(episodes)
        self._on_queued()

    def _is_beyond(self, column: Column) -> bool:
        """Return whether the broker would refuse it, and end the session."""
        given = {
            "reward": [turn.reward for turn in column.turns],
            "log_prob": [number for turn in column.turns for number in turn.log_prob],
        }
        return any(max(map(abs, numbers)) > self._bounds[name] for name, numbers in given.items())


# ---- Rewards for turns, each checked before any of them counts.

MAX_TURNS: Final = 1024
"""Of one conversation."""

Rewards = Sequence[tuple[int | None, float]]
"""Turns, from 0, and amounts; None: the newest turn."""


def _turn(turn: int | None, turns: int | None) -> int:
    """Return the number of a turn of a conversation that has ended; raises Refused (INVALID).

    turns: their number; None where the conversation is forgotten.
    """
    if turn is None and not turns:
        raise invalid("rewards.turn: absent, and no newest turn is known; name it")
    number = (turns or 0) - 1 if turn is None else turn
    if turns is not None and number >= turns:
        raise invalid(f"rewards.turn={number}: the conversation has {turns} turns")
    if number >= MAX_TURNS:
        raise invalid(f"rewards.turn={number}: no conversation has more than {MAX_TURNS} turns")
    return number


# ---- All conversations.


Feedback = Callable[[str, Sequence[tuple[str, int, float]]], Awaitable[None]]
"""Writes late rewards of a caller to the registry: (conversation id, turn, amount)."""

MAX_SIBLINGS: Final = 64
"""Of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a conversation, in tokens.

    most_tokens: of messages and answer together. column_tokens: of a column. answer_tokens: of an answer
    whose request names no limit. vocabulary: number of token ids. most_lag: updates that a column may span;
    None: any number. thought_tokens: of a thought; 0: the model does not think. thought_room: between the
    messages and an answer.
    """

    most_tokens: int
    column_tokens: int
    answer_tokens: int
    vocabulary: int
    most_lag: int | None
    thought_tokens: int = 0
    thought_room: int = 0


class Conversations:
    """Answers requests for text. Used by one event loop."""

    def __init__(
        self,
        section: ServingSection,
        limits: Limits,
        encoder: ChatEncoder,
        versions: AdapterVersions,
        answerer: TextAnswerer,
        episodes: Episodes,
        experience: ColumnExperience | None,
        feedback: Feedback | None,
        canary_monitor: CanaryMonitor,
        now: Callable[[], float],
    ) -> None:
        """experience: None: nothing is learned. feedback: None: there is no registry. now: in seconds."""
        self._section, self.limits, self._encoder = section, limits, encoder
        self._versions, self._answerer, self.episodes = versions, answerer, episodes
        self._experience, self._feedback = experience, feedback
        self._canary_monitor, self._now = canary_monitor, now
        self._talks: dict[str, OpenConversation] = {}
        self._ripening: deque[tuple[float, OpenConversation]] = deque()
        self._held = CallerShares(section.max_buffered_bytes)
        """Bytes of conversations that are open or wait for late rewards."""
        self._keeping = asyncio.Lock()

    @property
    def learns(self) -> bool:
        return self._experience is not None

    # ------------------------------------------------------------ answers

    async def generate(self, request: TextRequest, until_s: float, show: Show | None = None) -> TextReply:
        """Answer; raises Refused. until_s: by the clock of the event loop. show: see `Question`."""
        request.check(self.limits.vocabulary, self.limits.thought_tokens)
        whole = self._answerer.whole
        if whole is not None and request.begins_with:
            raise invalid(
                f"begins_with={request.begins_with[:40]!r}: every answer of this model has {whole} tokens of "
                "its own; leave it out"
            )
        # The most that an answer may hold: the request, and its tokens in a turn and in a reply.
        most = min(request.max_tokens or self.limits.answer_tokens, self.limits.most_tokens)
        sampled_bytes = 2 * SAMPLED_BYTES * request.count * (self.limits.thought_room + most)
        needed = request_bytes(request) + sampled_bytes
        owner = CALLER.get()
        self._check_size(request, owner, needed)
        # Reserved now: answers that are made at the same time would otherwise each count the same room.
        self._held.add(owner, needed)
        try:
            return await self._answer(request, until_s, show)
        finally:
            self._held.add(owner, -needed)

    async def stream(
        self, request: TextRequest, until_s: float
    ) -> AsyncGenerator[tuple[int, str] | TextReply, None]:
        """Yield parts of answers with their index as they come, and last the whole reply; raises Refused.

        Closing the generator ends the answers.
        """
        parts = asyncio.Queue[tuple[int, str] | None]()
        growing = asyncio.ensure_future(
            self.generate(request, until_s, lambda index, text: parts.put_nowait((index, text)))
        )
        growing.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await parts.get()) is not None:
                yield part
            yield await growing
        finally:
            growing.cancel()

    async def _answer(self, request: TextRequest, until_s: float, show: Show | None) -> TextReply:
        if not request.conversation_id:
            return await self._without_memory(request, until_s, show)
        talk = self._open(request.conversation_id)
        try:
            async with asyncio.timeout_at(until_s):
                await talk.busy.acquire()
        except TimeoutError as error:
            text = "the caller's time was over while another answer of the conversation was under way"
            raise Refused(Refusal(reason=Reason.DEADLINE, detail=text)) from error
        try:
            self._open(request.conversation_id)
            return talk.repeated(request) or await self._next(talk, request, until_s, show)
        finally:
            talk.busy.release()

    async def _without_memory(self, request: TextRequest, until_s: float, show: Show | None) -> TextReply:
        choice = await self._chosen(request)
        most, room = self._most(request), self.limits.thought_room
        try:
            ids = tuple(self._encoder.begin(request.messages, request.tools))
        except ValueError as error:
            raise _not_encoded(error) from error
        needed, left = self._needed(request), self.limits.most_tokens - len(ids) - room
        if needed > left:
            behind = f", {room} of a thought" if room else ""
            raise invalid(
                f"messages: {len(ids)} tokens{behind} and an answer of up to {needed} do not fit into "
                f"{self.limits.most_tokens}; send fewer messages or a smaller max_tokens"
            )
        call_id = f"call-{request.request_id[:32]}"
        question = Question(request=request, ids=ids, most=min(most, left), call_id=call_id, show=show)
        drawn = await self._drawn(choice, question, until_s)
        count_not_learned("unasked", sum(len(one.ids) for one in drawn.answers))
        return replace(drawn, unlearned="no conversation")

    async def _next(
        self, talk: OpenConversation, request: TextRequest, until_s: float, show: Show | None
    ) -> TextReply:
        if talk.next_turn >= MAX_TURNS:
            raise invalid(f"conversation_id: has {MAX_TURNS} turns, more are not remembered: start another")
        choice = self._versions.follow(talk.episode.arm, talk.episode.client_key)
        update = 0 if choice.loaded is None else choice.loaded.update
        most, room = self._most(request), self.limits.thought_room
        try:
            ids = talk.prompt_for(request, room + self._needed(request), update)
        except ValueError as error:
            raise _not_encoded(error) from error
        finally:
            self._count(talk)
        if len(talk.siblings) + request.count > MAX_SIBLINGS:
            raise invalid(
                f"regenerate: {len(talk.siblings)} answers to these messages are remembered, and no more "
                f"than {MAX_SIBLINGS}; go on with one of them"
            )
        self._ripen(talk)
        most = min(most, self.limits.column_tokens - len(ids) - room)
        call_id = f"call-{talk.episode.number}-{talk.next_turn}"
        question = Question(request=request, ids=ids, most=most, call_id=call_id, show=show)
        drawn = await self._drawn(choice, question, until_s)
        unlearned = self._unlearned(talk, request, drawn)
        siblings = [
            replace(self._sibling(drawn, one, unlearned), choice=index)
            for index, one in enumerate(drawn.answers)
        ]
        unlearned = unlearned or next((one.unlearned for one in siblings if one.unlearned), "")
        if self._experience is not None:
            self._experience.note_sampled(talk.name, drawn.version, drawn.answers)
        place: dict[str, Any] = {"conversation_id": talk.episode.id, "turn": talk.next_turn}
        reply = replace(drawn, **place, unlearned=unlearned, cut=talk.live.cut)
        talk.answered(request, reply, siblings)
        if talk.episode.opinion is not None:
            talk.episode.opinion.turns = talk.turns
        self._count(talk)
        return reply

    async def _drawn(self, choice: Choice, question: Question, until_s: float) -> TextReply:
        with self._versions.in_use(choice.loaded):
            return await self._answerer.answer(choice, question, until_s)

    def _most(self, request: TextRequest) -> int:
        most, whole = request.max_tokens or self.limits.answer_tokens, self._answerer.whole
        return most if whole is None else min(most, whole)

    def _needed(self, request: TextRequest) -> int:
        """Return for how many tokens of an answer there must be room."""
        most = self._most(request)
        return min(most, self.limits.answer_tokens) if request.may_be_shorter else most

    def _unlearned(self, talk: OpenConversation, request: TextRequest, drawn: TextReply) -> str:
        if self._answerer.form is not None:
            return "thought"
        if not talk.episode.learned:
            return talk.episode.unlearned_as
        return request.unlearned or ("fallback" if drawn.is_fallback else "")

    def _sibling(self, drawn: TextReply, one: TextAnswer, unlearned: str) -> Sibling:
        penalty = 0.0
        if one.is_blocked and not unlearned:
            penalty = 0.0 if self._answerer.guard is None else self._answerer.guard.penalty
            unlearned = "" if penalty else "blocked"
        sampled = Sampled(one.ids, one.log_prob, drawn.version, drawn.update)
        return Sibling(
            sampled=sampled, message=one.message, ended=one.ended, unlearned=unlearned, penalty=penalty
        )

    async def _chosen(self, request: TextRequest) -> Choice:
        if request.version:
            return await self._versions.exactly(request.version)
        if request.arm is None:
            return self._versions.choose(request.client_key)
        self._check_arm(request.arm)
        return self._versions.follow(request.arm, request.client_key)

    def _check_arm(self, arm: Arm) -> None:
        arms = self._versions.arms
        found = {Arm.LATEST: True, Arm.PINNED: False}
        if arms is not None:
            found |= {Arm.ACTIVE: arms.active is not None, Arm.CANARY: arms.canary is not None}
        if not found.get(arm, False):
            text = f"arm={arm.value}: no version is on it; ask for latest, or for a version by its number"
            raise Refused(Refusal(reason=Reason.UNKNOWN_VERSION, detail=text))

    def _check_size(self, request: TextRequest, owner: Identity | None, needed: int) -> None:
        texts = [text for one in request.messages for _, text in one.texts]
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + len(str(request.tools))
        most = BYTES_PER_TOKEN * self.limits.most_tokens
        if size > most:
            raise invalid(f"messages: have {size} bytes, at most {most} are read; send fewer or shorter ones")
        if needed > self._held.whole:
            raise invalid(
                f"n={request.count}: the answers may come to hold {needed} bytes, and all callers together "
                f"may hold {self._held.whole} (serving.max_buffered_bytes); ask for fewer, or for fewer "
                "tokens"
            )
        if not self._held.fits(owner, needed):
            why = self._held.why_not(owner, "serving.max_buffered_bytes")
            text = f"bytes of conversations: {why}; end some, or ask again later"
            raise Refused(Refusal(reason=Reason.OVERLOADED, detail=text, retry_after_ms=1000))

    def _count(self, talk: OpenConversation) -> None:
        size = talk.held_bytes if talk.episode.id in self._talks else 0
        self._held.add(talk.episode.owner, size - talk.counted_bytes)
        talk.counted_bytes = size

    # ------------------------------------------------------------ start

    def start(
        self,
        client_key: str,
        request_id: str,
        *,
        not_learned: bool = False,
        arm: Arm | None = None,
        must_exist: bool = False,
        opinions: bool = False,
    ) -> Episode:
        """Return a new conversation, or the one that the same request started before; raises Refused.

        must_exist: start none. opinions: its rewards are a person's opinions of the answers.
        """
        check_client_key(client_key)
        check_request_id(request_id)
        episode = self.episodes.started_by(client_key, request_id)
        if episode is not None:
            return episode
        if must_exist:
            text = f"request_id={request_id[:80]!r}: has begun no conversation that is remembered here"
            raise Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail=text))
        if arm is not None:
            self._check_arm(arm)
        chosen = self._versions.choose(client_key).arm if arm is None else arm
        learned = self.learns and chosen is Arm.LATEST and not not_learned
        episode = self.episodes.start(client_key, request_id, chosen, learned=learned, now_s=self._now())
        episode.unlearned_as = "unasked" if not_learned else "arm"
        episode.opinion = Opinion() if opinions else None
        self._canary_monitor.begin(episode)
        live = LiveConversation(
            self._encoder, most_tokens=self.limits.column_tokens, most_lag=self.limits.most_lag
        )
        self._talks[episode.id] = OpenConversation(episode, live)
        metrics.EPISODES_OPEN.set(len(self.episodes))
        return episode

    def _open(self, conversation_id: str) -> OpenConversation:
        return self._talks[self.episodes.find(conversation_id, self._now()).id]

    # ------------------------------------------------------------ reward

    async def reward(
        self,
        conversation_id: str,
        request_id: str,
        rewards: Rewards,
        *,
        asked: bool = False,
        choice: int | None = None,
    ) -> int:
        """Add rewards once, and return how many of them were late. Raises Refused when none was taken.

        asked: a person was asked for an opinion of these turns. choice: index of the rewarded answers in
        their replies; None: each reply has one, or another was chosen before.
        """
        check_request_id(request_id)
        episode = self.episodes.find_any(conversation_id)
        if episode is not None and request_id in episode.rewarded:
            return episode.rewarded[request_id]
        check_count(len(rewards))
        for _, amount in rewards:
            self._check_amount(amount)
        talk = self._talks.get(conversation_id)
        if talk is not None:
            return await self._reward(talk, request_id, rewards, asked=asked, choice=choice)
        turns = None if episode is None else episode.segment_builder.length
        late = [(_turn(turn, turns), amount) for turn, amount in rewards]
        async with self._keeping:
            # The same request may have come again while the registry took the first one.
            if episode is None or request_id not in episode.rewarded:
                await self._keep(conversation_id, late)
                if episode is not None:
                    episode.remember_reward(request_id, len(late))
        return len(late)

    def _check_amount(self, amount: float) -> None:
        check_amount(amount)
        most = math.inf if self._experience is None else self._experience.most_reward
        if abs(amount) > most:
            raise invalid(f"reward={amount:g}: the run takes {-most:g} to {most:g} (broker.max_reward)")

    async def _reward(
        self,
        talk: OpenConversation,
        request_id: str,
        rewards: Rewards,
        *,
        asked: bool,
        choice: int | None,
    ) -> int:
        async with talk.busy:
            if request_id in talk.episode.rewarded:
                return talk.episode.rewarded[request_id]
            try:
                placed = [(talk.place_of(turn, choice), amount) for turn, amount in rewards]
            except ValueError as error:
                raise invalid(str(error)) from error
            late = [(turn, amount) for turn, amount in placed if talk.is_late(turn)]
            if late:
                talk.is_keeping = True
                try:
                    await self._keep(talk.episode.id, late)
                finally:
                    talk.is_keeping = False
            for turn, amount in placed:
                if amount or not asked:  # That a person was asked is no reward of 0.
                    talk.reward(turn, amount)
            if talk.episode.opinion is not None:
                talk.episode.opinion.hear(placed, asked=asked)
            talk.episode.remember_reward(request_id, len(late))
            return len(late)

    async def _keep(self, conversation_id: str, late: Sequence[tuple[int, float]]) -> None:
        if self._feedback is None:
            raise invalid(
                f"turn={late[0][0]}: its reward came after the turn was sent to the learner "
                "(serving.reward_window_s), and there is no registry whose feedback table keeps it"
            )
        caller = CALLER.get()
        name = "" if caller is None else str(caller)
        await self._feedback(name, [(conversation_id, turn, amount) for turn, amount in late])
        metrics.FEEDBACK.inc(len(late))

    # ------------------------------------------------------------ end

    def end(
        self,
        conversation_id: str,
        request_id: str,
        *,
        terminated: bool,
        abandoned: bool,
        reward: float | None,
        failed: bool = False,
    ) -> tuple[float, int]:
        """End a conversation and return the sum of its rewards and its turns; repeats return the same.

        failed: nothing of it is learned from. Raises Refused.
        """
        check_request_id(request_id)
        known = self.episodes.find_any(conversation_id)
        if known is not None and known.is_over and known.ending_request == request_id != "":
            return known.total_return, known.segment_builder.length
        talk = self._open(conversation_id)
        if talk.busy.locked():
            raise invalid("conversation_id: an answer of it is under way; wait for its reply")
        if reward is not None:
            self._check_amount(reward)
            try:
                talk.reward(talk.place_of(None), reward)
            except ValueError as error:
                raise invalid(f"reward: {error}") from error
        if abandoned:
            talk.give_up()
        else:
            talk.end(terminated=terminated)
        talk.episode.ending_request, talk.has_failed = request_id, failed
        self._close(talk, is_whole=not abandoned)
        return talk.episode.total_return, talk.turns

    def _close(self, talk: OpenConversation, *, is_whole: bool) -> None:
        episode = talk.episode
        episode.is_over = True
        episode.segment_builder.length = talk.turns
        self._canary_monitor.end(episode, is_whole=is_whole)
        metrics.ARM_RETURN.labels(episode.arm).observe(episode.total_return)
        self.episodes.close(episode)
        metrics.EPISODES_OPEN.set(len(self.episodes))
        self._ripen(talk)
        self._forget(talk)
        self._count(talk)

    def _forget(self, talk: OpenConversation) -> None:
        if talk.episode.is_over and not talk.live.over:
            self._talks.pop(talk.episode.id, None)

    # ------------------------------------------------------------ columns

    def _ripen(self, talk: OpenConversation) -> None:
        for _ in range(talk.live.over - talk.ripening):
            if self._section.reward_window_s == 0.0:
                self._send(talk)
            else:
                talk.ripening += 1
                self._ripening.append((self._now() + self._section.reward_window_s, talk))

    def _send(self, talk: OpenConversation) -> None:
        for column in talk.live.take(1):
            if why := talk.dropped_as:
                count_not_learned(why, sum(len(turn.log_prob) for turn in column.turns))
            elif self._experience is not None and talk.episode.learned:
                self._experience.send(talk.name, talk.episode.lane, column)

    def sweep(self) -> None:
        """Give up conversations of silent clients, and send the columns that have waited long enough."""
        now = self._now()
        for episode in self.episodes.overdue(now):
            talk = self._talks[episode.id]
            if not talk.busy.locked():
                self._give_up(talk)
        self._send_until(now)

    def finish(self) -> None:
        """Give up all open conversations, and send all columns now."""
        for episode in self.episodes:
            self._give_up(self._talks[episode.id])
        self._send_until(math.inf)

    def close(self) -> None:
        if self._experience is not None:
            self._experience.close()

    def _give_up(self, talk: OpenConversation) -> None:
        talk.give_up()
        self._close(talk, is_whole=False)

    def _send_until(self, now_s: float) -> None:
        kept = list[tuple[float, OpenConversation]]()
        while self._ripening and self._ripening[0][0] <= now_s:
            ripe, talk = self._ripening.popleft()
            if talk.is_keeping:  # other columns do not wait for the registry
                kept.append((ripe, talk))
                continue
            talk.ripening -= 1
            self._send(talk)
            self._forget(talk)
            self._count(talk)
        self._ripening.extendleft(reversed(kept))


def _not_encoded(error: ValueError) -> Refused:
    """Return the refusal of messages that make no prompt; the log does not quote what people write."""
    logged = error.unquoted if isinstance(error, ForeignWord) else ""
    return Refused(Refusal(reason=Reason.INVALID, detail=str(error), logged=logged))
