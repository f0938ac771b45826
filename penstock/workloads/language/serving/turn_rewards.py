"""Rewards for turns, each checked before any of them counts."""

from collections.abc import Sequence
from typing import Any, Final

from penstock.protocol.refusal import invalid
from penstock.workloads.plugin.serving import check_amount, check_count

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
