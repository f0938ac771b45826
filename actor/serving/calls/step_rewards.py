"""Rewards in requests: which steps they are for, each checked before any of them counts."""

from typing import Any, Final

import numpy as np

from penstock.actor.serving.episodes.episodes import Episode
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import invalid

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
