"""What a shadow would have answered is on disk.

Its distribution, and how likely it finds what was answered.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actor.serving import shadow as shadow_module
from penstock.actor.serving.shadow import ShadowRecord, open_shadow_record
from penstock.config.settings import ConfigurationError, ServingSection
from penstock.protocol.tensor import to_tensor
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import Stand, broken, parts_of, policy_of, rows_of
from tests.unit.actor.serving.test_loaded_versions import arms


async def ask(stand: Stand, seed: int, **fields: Any) -> Any:
    """Its reply, after the shadow had its turn."""
    observation = rows_of(1, seed)["observation"][0]
    request = stand.asking(observation, **fields)
    reply, _ = await stand.answer(request, 1e12)
    await settle(stand)
    return reply


async def settle(stand: Stand) -> None:
    """Until the shadow has had its turn."""
    await stand.handler.shadow.finish()


def written(path: Path) -> list[dict[str, Any]]:
    """Its lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_answer_is_written_down_with_what_the_shadow_says(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    replies = [await ask(stand, seed, request_id=f"r-{seed}") for seed in range(3)]
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


async def test_every_step_of_an_episode_is_written_down(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    episode = stand.start()
    for step in range(10):
        await stand.play(episode, 1, step)
        await settle(stand)
    record.close()
    rows = [row for row in written(tmp_path / "shadow.jsonl") if row["episode_id"] == episode]
    assert [row["shadow"]["version"] for row in rows] == [2] * 10


@pytest.mark.promise("shadow-version-changes-answer")
async def test_the_shadow_is_under_the_mask_of_the_request(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    allowed = np.array([True, False, True])
    for seed in range(8):
        await ask(stand, seed, action_mask=[pb.Part(value=to_tensor(allowed))])
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


async def test_a_shadow_that_cannot_answer_is_written_down_as_such(tmp_path: Path) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2, policy=broken(policy_of(stand.specification, 2)))
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    await ask(stand, 0)
    record.close()
    (row,) = written(tmp_path / "shadow.jsonl")
    assert "version 2: " in row["shadow"]["error"]


async def test_the_file_is_turned_over_and_no_disk_fails_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_module, "_MOST_BYTES", 1024)
    folder = tmp_path / "record"
    folder.mkdir()
    record = ShadowRecord(folder / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    for seed in range(20):
        await ask(stand, seed)
    record.close()
    assert sorted(path.name for path in folder.iterdir()) == ["shadow.jsonl", "shadow.jsonl.1"]
    before = metrics.SHADOW_UNRECORDED._value.get()
    record = ShadowRecord(tmp_path / "gone" / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    assert (await ask(stand, 21)).version == 1
    record.close()
    assert metrics.SHADOW_UNRECORDED._value.get() == before + 1


async def test_what_waits_to_be_written_is_bounded_by_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_module, "_MOST_WAITING_ROWS", 64)
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    before = metrics.SHADOW_UNRECORDED._value.get()
    monkeypatch.setattr(record, "_write", held := Held(record._write))
    for seed in range(5):
        await stand.answer(stand.asking(rows_of(32, seed)["observation"], batch=32), 1e12)
        await stand.handler.shadow.finish()
    assert metrics.SHADOW_UNRECORDED._value.get() - before == 3
    held.may_go_on.set()
    record.close()
    assert len(written(tmp_path / "shadow.jsonl")) == 2
    assert record._waiting_rows == 0


async def test_an_answer_that_comes_late_or_cannot_be_written_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ShadowRecord(tmp_path / "shadow.jsonl")
    stand = Stand(record=record)
    stand.keep(1)
    stand.keep(2)
    await stand.loaded_versions.steer(arms(1, 2, shadow=2))
    before = metrics.SHADOW_UNRECORDED._value.get()
    with monkeypatch.context() as broken_line:
        broken_line.setattr(shadow_module, "_lists", lambda _: {"no JSON": object()})
        await ask(stand, 1)
        record._thread.submit(lambda: None).result()
    assert (metrics.SHADOW_UNRECORDED._value.get() - before, record._waiting_rows) == (1, 0)
    record.close()
    await ask(stand, 2)
    assert metrics.SHADOW_UNRECORDED._value.get() - before == 2


class Held:
    """A disk that stands still for a while."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write, self.may_go_on = write, threading.Event()

    def __call__(self, *line: Any) -> None:
        """Written when it goes on."""
        assert self.may_go_on.wait(30.0)
        self._write(*line)


def test_shadows_are_recorded_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    assert open_shadow_record(ServingSection(), None) is None
    record = open_shadow_record(ServingSection(), tmp_path)
    assert record is not None
    record.close()
    nowhere = ServingSection(shadow_record=tmp_path / "nowhere" / "shadow.jsonl")
    with pytest.raises(ConfigurationError, match=r"serving\.shadow_record=.*nowhere/shadow\.jsonl"):
        open_shadow_record(nowhere, tmp_path)
