import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actor.serving import batcher
from penstock.actor.serving import shadow as shadow_module
from penstock.actor.serving.loaded_versions import MAX_LOADED, Weights
from penstock.actor.serving.release import CanaryMonitor
from penstock.actor.serving.server_process import check_window
from penstock.actor.serving.shadow import ShadowRecord, open_shadow_record
from penstock.config.settings import CanarySection, ConfigurationError, ServingSection
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.tensor import to_tensor
from penstock.registry.records import Traffic
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.run.small_run import specification
from tests.support.serving.server_parts import (
    Stand,
    broken,
    parts_of,
    policy_of,
    ready,
    reason_of,
    rows_of,
    seen,
)
from tests.unit.actor.test_batcher import Held


def arms(active: int | None, *pinned: int, canary: int | None = None, **traffic: Any) -> Arms:
    held = {version for version in (active, canary, *pinned) if version is not None}
    return Arms(
        traffic=Traffic(policy="default", **traffic), active=active, canary=canary, pinned=frozenset(held)
    )


async def ask(stand: Stand, **fields: Any) -> pb.ActReply:
    reply, _ = await stand.answer(stand.asking(seen(0), **fields), 1e9)
    return reply


async def publish_broken(stand: Stand, version: int) -> None:
    await stand.publish(version, policy=broken(policy_of(stand.specification, version)))


async def test_the_previous_version_answers_for_one_that_cannot() -> None:
    stand = await ready()
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


async def test_the_previous_version_answers_for_one_that_no_longer_can() -> None:
    stand = await ready()
    await ask(stand)
    await stand.publish(2)
    await ask(stand)
    assert stand.loaded_versions.latest is not None
    broken(stand.loaded_versions.latest.policy)
    reply = await ask(stand)
    assert (reply.version, reply.fallback) == (1, pb.FALLBACK_PREVIOUS)


async def test_without_a_previous_version_the_action_is_drawn_uniformly() -> None:
    stand = Stand()
    await publish_broken(stand, 1)
    rows = np.zeros((300, 4), np.float32)
    request = stand.asking(seen(0), batch=300)
    request.observation[0].CopyFrom(parts_of(stand.specification.observation_space, rows)[0])
    reply, _ = await stand.answer(request, 1e9)
    assert (reply.version, reply.fallback) == (0, pb.FALLBACK_UNIFORM)
    assert not reply.log_prob
    assert set(np.frombuffer(reply.action[0].value.data, np.int64).tolist()) == {0, 1, 2}


async def test_the_fixed_action_is_read_from_the_configuration() -> None:
    stand = await ready(fallback="fixed", fallback_action=2)
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
async def test_a_fixed_action_outside_the_space_is_refused_at_the_start(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="fallback_action"):
        Stand(fallback="fixed", fallback_action=given)


async def test_an_arm_with_damaged_weights_keeps_its_previous_version() -> None:
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


async def test_a_swap_does_not_change_running_answers() -> None:
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


async def test_weights_that_do_not_fit_change_nothing() -> None:
    stand = await ready()
    for blob in (b"", b"\0" * 100, stand.weights[1].blob[:-8]):
        with pytest.raises(ValueError, match="weights"):
            await stand.loaded_versions.take_latest(Weights(2, 2, blob))
    assert (await ask(stand)).version == 1


async def test_a_named_version_answers_or_is_refused_as_unknown() -> None:
    stand = await ready()
    stand.keep(5)
    replies = await asyncio.gather(*(ask(stand, version=5) for _ in range(10)))
    assert {(reply.version, reply.arm) for reply in replies} == {(5, pb.ARM_PINNED)}
    assert stand.fetched == [5]
    stand.weights[6] = Weights(6, 6, b"no weights")
    for version in (6, 7, 2**63):
        with pytest.raises(Refused, match=f"version={version}: ") as error:
            await ask(stand, version=version)
        assert reason_of(error.value) is Reason.UNKNOWN_VERSION


async def test_of_the_requested_versions_the_most_recently_used_stay_loaded() -> None:
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


async def test_arms_load_their_versions_and_release_others() -> None:
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


async def test_a_client_without_a_key_is_assigned_anew_and_one_with_a_key_stays() -> None:
    stand = Stand()
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, canary=2, canary_share=0.5))
    assert {(await ask(stand)).version for _ in range(60)} == {1, 2}
    for key in ("ada", "bob", "eve"):
        assert len({(await ask(stand, client_key=key)).version for _ in range(10)}) == 1


@pytest.mark.promise("shadow-version-changes-answer")
async def test_a_shadow_answers_as_well_and_changes_no_answer() -> None:
    stand = await shadowed(shadow_is_broken=True)
    (family,) = metrics.SHADOW_AGREEMENT.collect()
    before = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    assert (await ask(stand)).version == 1
    await stand.handler.shadow.finish()
    (family,) = metrics.SHADOW_AGREEMENT.collect()
    after = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    assert (after["count"] - before["count"], after["sum"] - before["sum"]) == (1, 0.0)


RUN = replace(specification(), stale_after=8, update_steps=2000)


def test_a_reward_window_that_makes_all_experience_stale_is_refused() -> None:
    section = ServingSection(reward_window_s=20.0, declared_steps_per_s=1000.0)
    with pytest.raises(ConfigurationError, match=r"10\.0 updates, and what is older than 8 is stale"):
        check_window(section, RUN)


@pytest.mark.parametrize(
    "changed", [{"reward_window_s": 10.0}, {"declared_steps_per_s": None}, {"declared_steps_per_s": 500.0}]
)
def test_a_valid_reward_window_is_accepted(changed: dict[str, float | None]) -> None:
    given = {"reward_window_s": 20.0, "declared_steps_per_s": 1000.0} | changed
    check_window(ServingSection.model_validate(given), RUN)


def test_the_bounds_of_a_return_range_must_rise() -> None:
    with pytest.raises(ConfigurationError, match=r"canary\.return_range"):
        CanaryMonitor(CanarySection(return_range=(1.0, 0.0)), lambda _version, _why: None, lambda: 0.0)


PATIENCE_S = 30.0


async def shadowed(*, shadow_is_broken: bool = False, **serving: Any) -> Stand:
    """Version 1 answers, version 2 is its shadow."""
    stand = Stand(**serving)
    stand.keep(1)
    shadow = policy_of(stand.specification, 2)
    stand.keep(2, policy=broken(shadow) if shadow_is_broken else shadow)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    return stand


class Slow:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.passes: list[tuple[int, int]] = []
        original = batcher.answer

        def answer(loaded: Any, questions: Any) -> Any:
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            self.passes.append((len(questions), niceness))
            self.has_begun.set()
            assert self.may_go_on.wait(PATIENCE_S)
            return original(loaded, questions)

        monkeypatch.setattr(shadow_module, "answer", answer)


@pytest.mark.promise("shadow-delays-answer-asked")
async def test_clients_are_answered_while_the_shadow_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    await stand.answer(stand.asking(seen(0)), 1e12)
    assert await asyncio.to_thread(slow.has_begun.wait, PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(stand.answer(stand.asking(seen(step)), 1e12) for step in range(20)))
        await stand.play(stand.start(), 5)
    assert [count for count, _ in slow.passes] == [1]
    slow.may_go_on.set()
    await stand.handler.shadow.finish()
    assert [count for count, _ in slow.passes] == [1, 25]
    if sys.platform == "linux":
        assert {niceness for _, niceness in slow.passes} == {19}
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


@pytest.mark.promise("shadow-delays-answer-asked")
async def test_the_shadow_answers_after_the_reply_and_after_waiting_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    slow.may_go_on.set()
    monkeypatch.setattr(shadow_module, "GRACE_S", 1e6)
    shadow = stand.handler.shadow
    await stand.answer(stand.asking(seen(0)), 1e12)
    assert shadow._running is None
    stand.batcher._rows = 1  # somebody waits
    shadow._grace_is_over()
    assert shadow._running is None
    stand.batcher._rows = 0
    shadow._grace_is_over()
    await shadow.finish()
    assert len(slow.passes) == 1


async def test_shadow_answers_without_time_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    monkeypatch.setattr(shadow_module, "MAX_ROWS", 10)
    await stand.answer(stand.asking(seen(0)), 1e12)
    assert await asyncio.to_thread(slow.has_begun.wait, PATIENCE_S)
    before = metrics.SHADOW_SHED._value.get()
    for step in range(25):
        await stand.answer(stand.asking(seen(step)), 1e12)
    assert metrics.SHADOW_SHED._value.get() - before == 15
    slow.may_go_on.set()
    await stand.handler.shadow.finish()
    assert [count for count, _ in slow.passes] == [1, 10]


@pytest.mark.promise("shadow-delays-answer-asked")
async def test_the_cost_of_the_shadow_is_counted() -> None:
    stand, before = await shadowed(), metrics.SHADOW_SECONDS._value.get()
    await stand.answer(stand.asking(rows_of(1)["observation"][0]), 1e12)
    await stand.handler.shadow.finish()
    assert 0 < metrics.SHADOW_SECONDS._value.get() - before < PATIENCE_S


async def test_an_ending_server_waits_only_for_the_current_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow, stand = Slow(monkeypatch), await shadowed()
    for _ in range(2):
        await stand.answer(stand.asking(seen(0)), 1e12)
    slow.may_go_on.set()
    stand.handler.shadow.close()
    await asyncio.sleep(0)
    assert slow.passes == []


async def record_ask(stand: Stand, seed: int, **fields: Any) -> Any:
    """Its reply, after the shadow had its turn."""
    reply, _ = await stand.answer(stand.asking(rows_of(1, seed)["observation"][0], **fields), 1e12)
    await stand.handler.shadow.finish()
    return reply


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_answer_is_recorded_with_the_shadows(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = await shadowed(record=record)
    replies = [await record_ask(stand, seed, request_id=f"r-{seed}") for seed in range(3)]
    record.close()
    shadow = policy_of(stand.specification, 2)
    for seed, (row, reply) in enumerate(zip(written(tmp_path / "shadow.jsonl"), replies, strict=True)):
        observation = rows_of(1, seed)
        action = {name: np.array(value) for name, value in row["answered"]["action"].items()}
        assert (row["request_id"], row["episode_id"]) == (f"r-{seed}", "")
        assert row["answered"]["version"] == reply.version == 1
        assert row["answered"]["arm"] == Arm.ACTIVE
        assert row["answered"]["log_prob"] == pytest.approx(list(reply.log_prob))
        assert parts_of(stand.specification.action_space, action["action"][0]) == list(reply.action)
        assert row["shadow"]["version"] == 2
        assert row["shadow"]["log_prob"] == pytest.approx(
            shadow.log_prob(observation, action).tolist(), abs=1e-5
        )
        (probabilities,) = row["shadow"]["distribution"]["action/probability"]
        assert np.log(probabilities[int(action["action"][0])]) == pytest.approx(
            row["shadow"]["log_prob"][0], abs=1e-4
        )
        assert sum(probabilities) == pytest.approx(1.0, abs=1e-5)


async def test_every_step_of_an_episode_is_recorded(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = await shadowed(record=record)
    episode = stand.start()
    for step in range(10):
        await stand.play(episode, 1, step)
        await stand.handler.shadow.finish()
    record.close()
    rows = [row for row in written(tmp_path / "shadow.jsonl") if row["episode_id"] == episode]
    assert [row["shadow"]["version"] for row in rows] == [2] * 10


@pytest.mark.promise("shadow-version-changes-answer")
async def test_the_shadow_uses_the_mask_of_the_request(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = await shadowed(record=record)
    allowed = np.array([True, False, True])
    for seed in range(8):
        await record_ask(stand, seed, action_mask=[pb.Part(value=to_tensor(allowed))])
    record.close()
    shadow = policy_of(stand.specification, 2)
    for seed, row in enumerate(written(tmp_path / "shadow.jsonl")):
        logits = shadow.step(rows_of(1, seed)).parameters[0]
        expected = np.where(allowed, np.exp(logits), 0.0)
        expected /= expected.sum()
        action = row["answered"]["action"]["action"][0]
        assert allowed[action]
        assert row["shadow"]["distribution"]["action/probability"][0] == pytest.approx(expected, abs=1e-5)
        assert row["shadow"]["log_prob"] == pytest.approx([np.log(expected[action])], abs=1e-5)


async def test_a_failed_shadow_answer_is_recorded(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = await shadowed(record=record, shadow_is_broken=True)
    await record_ask(stand, 0)
    record.close()
    (row,) = written(tmp_path / "shadow.jsonl")
    assert "version 2: " in row["shadow"]["error"]


async def test_the_record_file_rotates_and_a_full_disk_fails_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_module, "_MOST_BYTES", 1024)
    folder = tmp_path / "record"
    folder.mkdir()
    record = ShadowRecord(folder / "shadow.jsonl")
    stand = await shadowed(record=record)
    for seed in range(20):
        await record_ask(stand, seed)
    record.close()
    assert sorted(path.name for path in folder.iterdir()) == ["shadow.jsonl", "shadow.jsonl.1"]
    before = metrics.SHADOW_UNRECORDED._value.get()
    record = ShadowRecord(tmp_path / "gone" / "shadow.jsonl")
    stand = await shadowed(record=record)
    assert (await record_ask(stand, 21)).version == 1
    record.close()
    assert metrics.SHADOW_UNRECORDED._value.get() == before + 1


async def test_waiting_shadow_records_are_bounded_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_module, "_MOST_WAITING_ROWS", 64)
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = await shadowed(record=record)
    before = metrics.SHADOW_UNRECORDED._value.get()
    monkeypatch.setattr(record, "_write", held := RecordHeld(record._write))
    for seed in range(5):
        await stand.answer(stand.asking(rows_of(32, seed)["observation"], batch=32), 1e12)
        await stand.handler.shadow.finish()
    assert metrics.SHADOW_UNRECORDED._value.get() - before == 3
    held.may_go_on.set()
    record.close()
    assert len(written(tmp_path / "shadow.jsonl")) == 2
    assert record._waiting_rows == 0


async def test_a_late_or_unwritable_answer_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = await shadowed(record=record)
    before = metrics.SHADOW_UNRECORDED._value.get()
    with monkeypatch.context() as broken_line:
        broken_line.setattr(shadow_module, "_lists", lambda _: {"no JSON": object()})
        await record_ask(stand, 1)
        record._thread.submit(lambda: None).result()
    assert (metrics.SHADOW_UNRECORDED._value.get() - before, record._waiting_rows) == (1, 0)
    record.close()
    await record_ask(stand, 2)
    assert metrics.SHADOW_UNRECORDED._value.get() - before == 2


class RecordHeld:
    def __init__(self, write: Callable[..., None]) -> None:
        self._write, self.may_go_on = write, threading.Event()

    def __call__(self, *line: Any) -> None:
        assert self.may_go_on.wait(30.0)
        self._write(*line)


def test_shadows_are_recorded_where_a_file_is_set(tmp_path: Path) -> None:
    assert open_shadow_record(ServingSection(), None) is None
    record = open_shadow_record(ServingSection(), tmp_path)
    assert record is not None
    record.close()
    nowhere = ServingSection(shadow_record=tmp_path / "nowhere" / "shadow.jsonl")
    with pytest.raises(ConfigurationError, match=r"serving\.shadow_record=.*nowhere/shadow\.jsonl"):
        open_shadow_record(nowhere, tmp_path)
