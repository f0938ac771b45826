"""Whatever the episodes, the cuts and the way of resetting: the learner computes what the actor did."""

from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.settings import PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.rows import RankGroup, see
from tests.support.experience.remembering import Actor, batch_of, remembering

POLICIES: dict[str, dict[str, Any]] = {
    "lstm": {"recurrent": "lstm"},
    "gru of a shared trunk": {"recurrent": "gru", "shared_trunk": True},
    "stack": {"frame_stack": 3},
    "stack before an lstm, normalised": {
        "frame_stack": 2,
        "recurrent": "lstm",
        "normalise_observations": True,
    },
}
UNROLL = 8


@pytest.mark.parametrize("section", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("mode", AutoresetMode)
@settings(max_examples=6)
@given(
    cuts=st.lists(st.integers(1, UNROLL), min_size=1, max_size=4),
    longest=st.integers(1, 12),
    seed=st.integers(0, 999),
    masked=st.booleans(),
    burn_in=st.integers(0, 3),
)
def test_recorded_log_probabilities_are_the_learners(
    section: dict[str, Any],
    mode: AutoresetMode,
    cuts: list[int],
    longest: int,
    seed: int,
    masked: bool,
    burn_in: int,
) -> None:
    recurrent = {"burn_in": burn_in} if "recurrent" in section else {}
    policy = remembering(seed, **section, **recurrent)
    actor = Actor(policy, mode=mode, longest=longest, unroll=UNROLL, seed=seed, masked=masked)
    batch = batch_of([actor.fragment(steps) for steps in cuts])
    ppo = PPO(policy, PPOSection(), seed=0)
    with torch.no_grad():
        look = see(policy, batch)
        parameters = policy.outputs(look.inputs).parameters[: batch.valid.numel()]
        found = policy.joint_log_prob(parameters, {"action": batch.action["action"].flatten()})
        same = torch.isclose(found.view_as(batch.log_prob), batch.log_prob, rtol=1e-4, atol=1e-4)
        assert same[batch.valid].all()
        prepared = ppo.prepare(batch, batch.reward, RankGroup().rows_of(batch.valid))
        rows = prepared.rows
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        sizes = prepared.rank_rows.split(order, 3)[1] if len(rows) else []
        for part in rows.select(order).cut(sizes) if len(rows) else ():
            outputs = ppo._network.outputs(part.inputs)
            again = policy.joint_log_prob(outputs.parameters, part.action)
            torch.testing.assert_close(again, part.behaviour, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(again, part.proximal, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(outputs.value, part.old_value, rtol=1e-5, atol=1e-5)
