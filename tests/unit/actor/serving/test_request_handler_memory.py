"""Policies with state and masked steps at the server.

Remembered by the episode or by the client, and learned from.
"""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.client.calls import from_plain_parts, to_plain_parts
from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.schema import fragment_schema, mask_rules, state_rules
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import to_tensor
from penstock.v1 import policy_pb2 as pb
from tests.support.experience.remembering import batch_of
from tests.support.serving.server_parts import (
    FAR,
    Stand,
    column,
    parts_of,
    policy_of,
    reason_of,
    seen,
    specification,
)

POLICIES: dict[str, dict[str, Any]] = {
    "lstm": {"recurrent": "lstm", "recurrent_size": 5},
    "gru behind a stack": {"recurrent": "gru", "recurrent_size": 5, "shared_trunk": True, "frame_stack": 3},
    "stack": {"frame_stack": 3},
    "nothing": {},
}


def made(section: dict[str, Any], *, masked: bool = False, unroll: int = 4) -> RunSpecification:
    """A run of such a policy."""
    plain = specification(unroll=unroll, **section)
    spaces = (plain.observation_space, plain.action_space)
    masks = mask_rules(spaces[1]) if masked else ()
    state = state_rules(policy_of(plain, 0).state_space)
    schema = fragment_schema(*spaces, (*masks, *state))
    return RunSpecification(**{name: getattr(plain, name) for name in plain.__slots__} | {"schema": schema})


async def stand_of(section: dict[str, Any], **options: Any) -> Stand:
    """A stand with version 1."""
    stand = Stand(made(section, **options))
    await stand.publish(1)
    return stand


def log_probs(policy: Policy, batch: Batch) -> torch.Tensor:
    """The learner's of what was done, [T, B]."""
    with torch.no_grad():
        parameters = policy.outputs(see(policy, batch).inputs).parameters[: batch.valid.numel()]
        found = policy.joint_log_prob(parameters, {"action": batch.action["action"].flatten()})
    return found.view_as(batch.log_prob)


def mask_parts(stand: Stand, allowed: list[bool]) -> list[pb.Part]:
    """A mask as a client sends it."""
    return parts_of(stand.specification.action_space, np.array(allowed))


@pytest.mark.parametrize("section", POLICIES.values(), ids=POLICIES)
async def test_the_learner_computes_what_an_episode_was_answered_with(section: dict[str, Any]) -> None:
    stand = await stand_of(section, masked=True)
    episodes = [stand.start("ada"), stand.start("bob")]
    for step in range(10):
        for number, episode in enumerate(episodes):
            mask = {"action_mask": mask_parts(stand, [True, step % 4 == 0, True])} if step % 2 else {}
            await stand.act(episode, seen(step, number), **mask)
    for number, episode in enumerate(episodes):
        stand.end(episode, pb.ENDING_TRUNCATED, final=seen(10, number))
    fragments = stand.fragments()
    assert len(fragments) == 6
    assert all(all(column(fragment, "valid")) for fragment in fragments)
    batch = batch_of(fragments)
    expected = log_probs(policy_of(stand.specification, 1), batch)
    torch.testing.assert_close(expected[batch.valid], batch.log_prob[batch.valid], rtol=1e-4, atol=1e-4)
    masks = np.concatenate([fragment.arrays()["mask/action"][:-1, 0] for fragment in fragments])
    assert (~masks[:, 1]).sum() == 2 * 5


async def test_a_step_under_a_mask_is_learned_from_where_the_run_has_masks() -> None:
    stand = await stand_of({}, masked=True)
    episode = stand.start()
    taken = parts_of(stand.specification.action_space, np.int64(1))
    with pytest.raises(Refused) as error:
        await stand.act(
            episode, seen(0), taken_action=taken, action_mask=mask_parts(stand, [True, False, True])
        )
    assert reason_of(error.value) is Reason.INVALID
    assert "action_mask forbids" in error.value.refusal.detail
    await stand.act(episode, seen(0), action_mask=mask_parts(stand, [False, False, True]))
    stand.end(episode, pb.ENDING_TERMINATED, final=seen(1))
    (fragment,) = stand.fragments()
    assert column(fragment, "valid") == [True]
    assert column(fragment, "action") == [2]
    assert column(fragment, "log_prob") == [0.0]
    assert fragment.arrays()["mask/action"][:, 0].tolist() == [[False, False, True], [True, True, True]]


@pytest.mark.parametrize("section", [POLICIES["lstm"], POLICIES["stack"]], ids=["lstm", "stack"])
async def test_a_client_that_keeps_the_state_gets_the_answers_of_an_episode(section: dict[str, Any]) -> None:
    stand = await stand_of(section)
    episode, state = stand.start(), list[pb.Part]()
    wishes = {"deterministic": True, "want_value": True}
    for step in range(6):
        held = await stand.act(episode, seen(step), **wishes)
        reply, _ = await stand.answer(stand.asking(seen(step), state=state, **wishes), FAR)
        assert not held.state
        np.testing.assert_allclose(reply.value, held.value, rtol=1e-5)
        assert [part.value.data for part in reply.action] == [part.value.data for part in held.action]
        # Through the client's own hands.
        state = to_plain_parts(from_plain_parts("state", reply.state))
    fresh, _ = await stand.answer(stand.asking(seen(5), **wishes), FAR)
    assert not np.allclose(fresh.value, reply.value, rtol=1e-3)


async def test_state_of_a_batch_has_its_rows() -> None:
    stand = await stand_of(POLICIES["lstm"])
    rows = [pb.Part(value=to_tensor(np.zeros((3, 4), np.float32)))]
    reply, _ = await stand.answer(pb.ActRequest(observation=rows, batch=3), FAR)
    shapes = {part.path: tuple(part.value.shape) for part in reply.state}
    assert shapes == {"actor/h": (3, 5), "actor/c": (3, 5), "critic/h": (3, 5), "critic/c": (3, 5)}


@pytest.mark.parametrize(
    ("parts", "with_episode", "said"),
    [
        ({"actor/h": np.zeros(5, np.float32)}, False, "state: 1 parts, the space has 'actor/h'"),
        ({"actor/h": np.zeros(4, np.float32)}, False, "float32(4,) came, float32(5,) is wanted"),
        ({"actor/h": np.full(5, np.nan, np.float32)}, False, "NaN or infinity"),
        ({"actor/h": np.zeros(5, np.float32)}, True, "the episode keeps it here"),
    ],
)
async def test_state_that_is_not_the_policys_is_refused(
    parts: dict[str, Any], with_episode: bool, said: str
) -> None:
    stand = await stand_of(POLICIES["lstm"])
    names = ["actor/h"] if "has" in said else ["actor/h", "actor/c", "critic/h", "critic/c"]
    whole = dict.fromkeys(names, parts["actor/h"])
    fields = {"episode_id": stand.start()} if with_episode else {}
    request = stand.asking(seen(0), state=to_plain_parts(whole), **fields)
    asked = stand.reply(request, FAR) if with_episode else stand.answer(request, FAR)
    with pytest.raises(Refused) as error:
        await asked
    assert said in error.value.refusal.detail
