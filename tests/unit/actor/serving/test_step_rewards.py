"""Rewards of an episode that is forgotten have the bounds of any other's."""

import pytest

from penstock.actor.serving.request_handler import rewards_of
from penstock.actor.serving.requests import MAX_REWARDS
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import Refused
from penstock.v1 import policy_pb2 as pb


def test_a_step_that_no_episode_can_have_is_refused() -> None:
    last = pb.RewardRequest(rewards=[pb.StepReward(step=MAX_NUMBER, amount=1.0)])
    assert rewards_of(None, last) == [(MAX_NUMBER, 1.0)]
    for step in (MAX_NUMBER + 1, 2**63, 2**64 - 1):
        request = pb.RewardRequest(rewards=[pb.StepReward(step=step, amount=1.0)])
        with pytest.raises(Refused, match=f"rewards.step={step}: no episode has more"):
            rewards_of(None, request)


def test_no_call_holds_more_rewards_than_the_limit() -> None:
    for count in (0, MAX_REWARDS + 1):
        request = pb.RewardRequest(rewards=[pb.StepReward(step=0, amount=1.0)] * count)
        with pytest.raises(Refused, match=f"rewards: {count} in one call"):
            rewards_of(None, request)
