"""A disk under a gateway fills up: what was trained is named when it is whole, and not before."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import httpx2

from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.workloads.rlhf.policy_service import service
from tests.processes.gateway.test_gateway_process import new_token
from tests.support.gateway.job_templates import write_tiny
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.run.harness import GatewayProcess
from tests.support.storage.small_disk import SmallDisk, can_mount, small_disk

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs leave to mount a small disk")

RATINGS: Final = 12
MODEL_BYTES: Final = 400_000
PARTS: Final = {
    "policies/v9/adapter_model.safetensors",
    "reward_model/reward.json",
    "base_model/model.safetensors",
    "training_results.json",
}
"""What a run leaves, each of MODEL_BYTES."""
TRAIN: Final = "/api/policies/train_policy/my_agent"
FEEDBACK: Final = "/api/policies/feedback/my_agent"
EXPORT: Final = "/api/projects/alpha/agents/my_agent/feedback"


@pytest.fixture
def models(tmp_path: Path) -> Iterator[SmallDisk]:
    """The disk on which models are exported, and nothing else lies."""
    (tmp_path / "models").mkdir()
    with small_disk("tmpfs", tmp_path / "models", lambda: None) as disk:
        yield disk


@pytest.fixture
def gateway(tmp_path: Path) -> SmallGateway:
    """One that trains from feedback, and looks after its jobs when a test says so."""
    runner = LocalRunner(tmp_path / "jobs", write_tiny(tmp_path / "templates"))
    accounts, registry = (f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("accounts", "registry"))
    return SmallGateway.at(accounts, registry, tmp_path, runner=runner, services=[service()])


def rate(number: int) -> dict[str, Any]:
    """A rating."""
    return {"prompt": f"question {number}", "response": "yes of course", "score": number % 6 / 5}


def asked(gateway: SmallGateway, editor: dict[str, str], key: str) -> Any:
    """The answer to somebody who asks for a training, or asks again for the same one."""
    headers = editor | {"Prefer": "wait=0", "Idempotency-Key": key}
    return gateway.client.post(TRAIN, json={"maxSteps": 2}, headers=headers)


def trained(gateway: SmallGateway, folder: Path, job: str) -> None:
    """What the training of a job leaves, seen by the gateway."""
    run = folder / "jobs" / job / "run"
    for part in PARTS:
        (run / part).parent.mkdir(parents=True, exist_ok=True)
        (run / part).write_bytes(b"x" * MODEL_BYTES)
    (run / "manifest.json").write_text(
        json.dumps({"policy": "policies/v9", "made_from": {"model": str(run / "base_model")}})
    )
    (run / "summary.json").write_text(json.dumps({"interrupted": False, "solved": True, "updates": 2}))
    for name, content in (("lock", ""), ("begun.json", '{"group": 1}'), ("ended.json", '{"code": 0}')):
        (run.parent / name).write_text(content)
    assert gateway.parts.dispatcher is not None
    gateway.parts.dispatcher.look()


@pytest.mark.parametrize("left", [0, MODEL_BYTES // 2, 2 * MODEL_BYTES + MODEL_BYTES // 2])
def test_a_training_whose_models_have_no_room_fails_and_the_next_one_is_exported(
    gateway: SmallGateway, models: SmallDisk, tmp_path: Path, left: int
) -> None:
    editor = gateway.token("alpha")
    for number in range(RATINGS):
        assert gateway.client.post(FEEDBACK, json=rate(number), headers=editor).status_code == 200
    models.fill(left)
    trained(gateway, tmp_path, asked(gateway, editor, "first").json()["policyId"])
    refused = asked(gateway, editor, "first")
    assert (refused.status_code, refused.json()["error"]) == (500, "training_failed")
    assert "what it made was not exported" in refused.json()["detail"]
    assert "No space left on device" in refused.json()["detail"]
    assert gateway.get("/api/policies/my_agent", editor).json() == []
    assert [one.name for one in (tmp_path / "models").rglob("*") if one.is_file()] == ["ballast"]
    assert not list((tmp_path / "models").rglob("*v12*"))
    models.free()
    job = asked(gateway, editor, "second").json()["policyId"]
    trained(gateway, tmp_path, job)
    assert asked(gateway, editor, "second").json()["version"] == "v12"
    (listed,) = gateway.get("/api/policies/my_agent", editor).json()
    place = Path(listed["modelPath"])
    assert (place / "adapter_model.safetensors").stat().st_size == MODEL_BYTES
    assert (place.parent / "reward_model" / "reward.json").stat().st_size == MODEL_BYTES
    shown = gateway.get(f"/api/projects/alpha/jobs/{job}", editor).json()
    assert shown["state"] == JobState.FINISHED


def test_feedback_is_exported_from_a_disk_that_is_full_and_taken_in_again_later(tmp_path: Path) -> None:
    state = tmp_path / "gateway-state"
    state.mkdir(mode=0o700)
    with small_disk("tmpfs", state, lambda: None) as disk:
        token = new_token(tmp_path, "alpha")
        headers = {"Authorization": f"Bearer {token}"}
        with (
            GatewayProcess(tmp_path) as gateway,
            httpx2.Client(base_url=gateway.url, headers=headers, timeout=120) as http,
        ):
            for number in range(RATINGS):
                assert http.post(FEEDBACK, json=rate(number)).status_code == 200
            disk.fill(0)
            key = {"Idempotency-Key": "late"}
            refused = http.post(FEEDBACK, json=rate(RATINGS), headers=key)
            assert (refused.status_code, refused.json()["error"]) == (503, "unavailable")
            assert refused.headers["Retry-After"]
            assert len(http.get(EXPORT).text.splitlines()) == RATINGS
            assert http.get("/api/health").status_code == 200
            disk.free()
            assert http.post(FEEDBACK, json=rate(RATINGS), headers=key).status_code == 200
            assert len(http.get(EXPORT).text.splitlines()) == RATINGS + 1
        assert "a request failed" not in gateway.log.read_text()
