"""Columns of conversations that are over, on their way to the learner as fragments of one column each.

What cannot be learned from is answered all the same, and counted in sampled tokens by reason:

    arm         the conversation follows a version that is not the learner's newest
    unasked     its client does not want it, or there is no conversation
    sampling    it was not drawn from the policy as it is
    blocked     the guard let not all of it pass, and that is no reward
    thought     it was thought, or answered behind a thought: what it is worth only a known answer tells
    fallback    the model answered without its adapter
    sibling     of several answers to the same messages another was gone on with
    stopped     its caller did not wait for its end
    abandoned   its caller did not say what came of it
    full, too_large, stale, lost   as those of a policy server
"""

from collections.abc import Sequence
from typing import Any, Final

from penstock.config.settings import ServingSection
from penstock.protocol.messages import Publication
from penstock.protocol.refusal import invalid
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.workloads.language.conversation.live_conversation import Column, ColumnFragments
from penstock.workloads.language.serving.asks import TextAnswer
from penstock.workloads.plugin.fragments import HeaderFields, LearnerReward
from penstock.workloads.plugin.serving import (
    RunFollower,
    SampleJournal,
    ServedQueue,
    check_amount,
    check_count,
    count_not_learned,
)

REASONS: Final = (
    *("arm", "unasked", "sampling", "blocked", "thought", "fallback", "sibling", "stopped"),
    *("abandoned", "full", "too_large", "stale", "lost"),
)


class ColumnExperience:
    """Used by one event loop."""

    def __init__(
        self,
        specification: RunSpecification,
        section: ServingSection,
        follower: RunFollower,
        pad_id: int,
        reward: LearnerReward | None = None,
        journal: SampleJournal | None = None,
    ) -> None:
        """follower: whose queue the fragments go to. journal: for the audit.

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

    def note_sampled(self, conversation: str, version: int, answers: Sequence[TextAnswer]) -> None:
        """Record what was drawn, before it leaves."""
        if self._journal is not None:
            self._journal.sampled(conversation, version, [one.ids for one in answers])

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def send(self, conversation: str, lane: int, column: Column) -> None:
        """Have a column of a conversation learned from, if there is room for it.

        lane: its slot, in which conversations follow one another.
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
        """Whether the broker would refuse it, and the session with it."""
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


def read(request: Any) -> Rewards:
    """Turns and amounts of a TurnRewardsRequest; raises Refused (INVALID) for too many."""
    check_count(len(request.rewards))
    return [(one.turn if one.HasField("turn") else None, one.amount) for one in request.rewards]


def check(rewards: Rewards) -> None:
    """Raise Refused (INVALID) for none, too many, and amounts that are not finite."""
    check_count(len(rewards))
    for _, amount in rewards:
        check_amount(amount)


def of_turns(rewards: Rewards, turns: int | None) -> list[tuple[int, float]]:
    """The same for a conversation that is over and sent, by number of the turn; raises Refused (INVALID).

    turns: that it had; None where it is forgotten.
    """
    return [(_turn(turn, turns), amount) for turn, amount in rewards]


def _turn(turn: int | None, turns: int | None) -> int:
    if turn is None and not turns:
        raise invalid("rewards.turn: absent, and no newest turn is known; name it")
    number = (turns or 0) - 1 if turn is None else turn
    if turns is not None and number >= turns:
        raise invalid(f"rewards.turn={number}: the conversation has {turns} turns")
    if number >= MAX_TURNS:
        raise invalid(f"rewards.turn={number}: no conversation has more than {MAX_TURNS} turns")
    return number
