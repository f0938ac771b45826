"""Who answers, and who stands in when that version cannot."""

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.actor.serving.loaded_versions import MAX_LOADED, Weights
from penstock.config.settings import ConfigurationError
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.records import Traffic
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import (
    Stand,
    broken,
    parts_of,
    policy_of,
    question_of,
    reason_of,
    seen,
)
from tests.unit.actor.serving.test_batcher import Held


def arms(active: int | None, *pinned: int, canary: int | None = None, **traffic: Any) -> Arms:
    """As the registry has them."""
    held = {version for version in (active, canary, *pinned) if version is not None}
    return Arms(
        traffic=Traffic(policy="default", **traffic), active=active, canary=canary, pinned=frozenset(held)
    )


async def ask(stand: Stand, **fields: Any) -> pb.ActReply:
    """One request without an episode."""
    reply, _ = await stand.answer(stand.asking(seen(0), **fields), 1e9)
    return reply


async def publish_broken(stand: Stand, version: int) -> None:
    """Weights of NaN."""
    await stand.publish(version, policy=broken(policy_of(stand.specification, version)))


# ---------------------------------------------------------------- fallbacks


async def test_a_version_that_cannot_answer_is_stood_in_for_by_the_one_before() -> None:
    stand = Stand()
    await stand.publish(1)
    assert (await ask(stand)).fallback == pb.FALLBACK_UNSPECIFIED
    for version in (2, 3):
        await publish_broken(stand, version)
        reply = await ask(stand, want_distribution=True)
        assert (reply.version, reply.fallback) == (1, pb.FALLBACK_PREVIOUS)
        assert reply.log_prob
        assert reply.distribution
    await stand.publish(4)
    reply = await ask(stand)
    assert (reply.version, reply.fallback) == (4, pb.FALLBACK_UNSPECIFIED)


async def test_a_version_that_answered_and_no_longer_does_has_the_one_before_it() -> None:
    stand = Stand()
    await stand.publish(1)
    await ask(stand)
    await stand.publish(2)
    await ask(stand)
    assert stand.loaded_versions.latest is not None
    broken(stand.loaded_versions.latest.policy)
    reply = await ask(stand)
    assert (reply.version, reply.fallback) == (1, pb.FALLBACK_PREVIOUS)


async def test_without_one_before_the_action_is_drawn_uniformly() -> None:
    stand = Stand()
    await publish_broken(stand, 1)
    rows = np.zeros((300, 4), np.float32)
    request = stand.asking(seen(0), batch=300)
    request.observation[0].CopyFrom(parts_of(stand.specification.observation_space, rows)[0])
    reply, _ = await stand.answer(request, 1e9)
    assert (reply.version, reply.fallback) == (0, pb.FALLBACK_UNIFORM)
    assert not reply.log_prob
    assert set(np.frombuffer(reply.action[0].value.data, np.int64).tolist()) == {0, 1, 2}


async def test_the_fixed_action_is_the_one_of_the_configuration() -> None:
    stand = Stand(fallback="fixed", fallback_action=2)
    await stand.publish(1)
    await ask(stand)
    await publish_broken(stand, 2)
    reply = await ask(stand)
    assert (reply.version, reply.fallback) == (0, pb.FALLBACK_FIXED)
    assert np.frombuffer(reply.action[0].value.data, np.int64).tolist() == [2]


async def test_without_a_fallback_no_answer_is_random() -> None:
    stand = Stand(fallback="none")
    await publish_broken(stand, 1)
    with pytest.raises(Refused, match="no version can answer") as error:
        await ask(stand)
    assert error.value.refusal.reason is Reason.NOT_READY
    assert error.value.refusal.retry_after_ms > 0


async def test_before_the_first_weights_the_fallback_answers() -> None:
    stand = Stand()
    reply = await ask(stand)
    assert (reply.version, reply.fallback, reply.arm) == (0, pb.FALLBACK_UNIFORM, pb.ARM_LATEST)


@pytest.mark.parametrize("given", [None, 3, -1, "left", [0, 1], 1.5])
async def test_a_fixed_action_that_is_none_of_the_space_is_refused_at_the_start(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="fallback_action"):
        Stand(fallback="fixed", fallback_action=given)


async def test_an_arm_whose_weights_are_damaged_keeps_the_version_before() -> None:
    stand = Stand()
    stand.keep(1)
    await stand.loaded_versions.steer(arms(1))
    assert (await ask(stand)).version == 1
    stand.weights[2] = Weights(2, 2, b"\0" * 100)
    (wrong,) = await stand.loaded_versions.steer(arms(2))
    assert "version=2" in wrong
    reply = await ask(stand)
    assert (reply.version, reply.fallback, reply.arm) == (1, pb.FALLBACK_PREVIOUS, pb.ARM_ACTIVE)
    stand.keep(2)
    assert await stand.loaded_versions.steer(arms(2)) == []
    assert ((await ask(stand)).version, (await ask(stand)).fallback) == (2, 0)


# ---------------------------------------------------------------- versions


async def test_a_swap_does_not_touch_answers_under_way() -> None:
    stand = Stand()
    held = Held()
    stand.loaded_versions.latest = held.loaded
    stand.batcher._work.note(1, 1.0)
    under_way = asyncio.create_task(ask(stand, want_value=True))
    await asyncio.to_thread(held.begun.wait, 60)
    await stand.publish(9)
    after = asyncio.create_task(ask(stand))
    held.go.set()
    assert [(await under_way).version, (await after).version] == [1, 9]


async def test_loaded_weights_are_never_changed() -> None:
    stand = Stand()
    await stand.publish(1)
    first = stand.loaded_versions.latest
    assert first is not None
    before = first.policy.step(question_of(3).observation).parameters.copy()
    await stand.publish(2)
    assert stand.loaded_versions.latest is not first
    np.testing.assert_array_equal(first.policy.step(question_of(3).observation).parameters, before)


async def test_weights_that_do_not_fit_change_nothing() -> None:
    stand = Stand()
    await stand.publish(1)
    for blob in (b"", b"\0" * 100, stand.weights[1].blob[:-8]):
        with pytest.raises(ValueError, match="weights"):
            await stand.loaded_versions.take_latest(Weights(2, 2, blob))
    assert (await ask(stand)).version == 1


async def test_a_version_that_is_named_answers_or_is_unknown() -> None:
    stand = Stand()
    await stand.publish(1)
    stand.keep(5)
    replies = await asyncio.gather(*(ask(stand, version=5) for _ in range(10)))
    assert {(reply.version, reply.arm) for reply in replies} == {(5, pb.ARM_PINNED)}
    assert stand.fetched == [5]
    stand.weights[6] = Weights(6, 6, b"no weights")
    for version in (6, 7, 2**63):
        with pytest.raises(Refused, match=f"version={version}: ") as error:
            await ask(stand, version=version)
        assert reason_of(error.value) is Reason.UNKNOWN_VERSION


async def test_of_the_versions_that_were_named_the_newest_used_stay() -> None:
    stand = Stand()
    for version in range(1, MAX_LOADED + 2):
        stand.keep(version)
    for version in range(1, MAX_LOADED + 1):
        await ask(stand, version=version)
    await ask(stand, version=1)
    await ask(stand, version=MAX_LOADED + 1)
    await ask(stand, version=1)
    assert stand.fetched == list(range(1, MAX_LOADED + 2))
    assert len(stand.loaded_versions.served()) == MAX_LOADED
    await ask(stand, version=2)
    assert stand.fetched[-1] == 2


async def test_arms_hold_what_they_need_and_let_go_of_the_rest() -> None:
    stand = Stand()
    for version in range(1, 7):
        stand.keep(version)
    traffic = {"canary_share": 0.5, "shadow": 3, "pins": {"ada": 4}}
    await stand.loaded_versions.steer(arms(1, 3, 4, canary=2, **traffic))
    assert sorted(stand.loaded_versions.served()) == [1, 2, 3, 4]
    await stand.loaded_versions.steer(arms(2, canary=5, canary_share=0.5))
    assert sorted(stand.loaded_versions.served()) == [2, 5]
    assert stand.fetched == [1, 2, 3, 4, 5]
    served = stand.loaded_versions.served()
    assert (served[2][1], served[5][1]) == ([Arm.ACTIVE], [Arm.CANARY])


async def test_who_says_no_name_is_dealt_anew_and_who_does_stays() -> None:
    stand = Stand()
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, canary=2, canary_share=0.5))
    assert {(await ask(stand)).version for _ in range(60)} == {1, 2}
    for key in ("ada", "bob", "eve"):
        assert len({(await ask(stand, client_key=key)).version for _ in range(10)}) == 1


@pytest.mark.promise("shadow-version-changes-answer")
async def test_a_shadow_answers_as_well_and_changes_no_answer() -> None:
    stand = Stand()
    stand.keep(1)
    stand.keep(2, policy=broken(policy_of(stand.specification, 2)))
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    (family,) = metrics.SHADOW_AGREEMENT.collect()
    before = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    assert (await ask(stand)).version == 1
    await stand.handler.shadow.finish()
    (family,) = metrics.SHADOW_AGREEMENT.collect()
    after = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    assert (after["count"] - before["count"], after["sum"] - before["sum"]) == (1, 0.0)
