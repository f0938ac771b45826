"""`penstock gateway` as its users start it: one process on a database, and two on one PostgreSQL."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.workloads.rlhf.policy_service import service
from tests.support.gateway.gateway_stand import PASSWORD, new_token, operator, sign_in
from tests.support.gateway.job_templates import write_tiny
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.run.harness import GatewayProcess
from tests.support.storage.postgresql_server import find_programs
from tests.support.storage.small_disk import SmallDisk, can_mount, small_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    done = operator(tmp_path, "user", "add", "ada", "--project", "alpha", stdin=f"{PASSWORD}\n")
    assert done.returncode == 0, done.stderr
    return tmp_path


def me(gateway: GatewayProcess, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return int(httpx2.get(f"{gateway.url}/api/me?secret=in-a-query", headers=headers, timeout=30).status_code)


def test_issued_tokens_and_stored_feedback_survive_a_kill(folder: Path) -> None:
    token = operator(folder, "token", "add", "ci", "--project", "alpha").stdout.strip()
    with GatewayProcess(folder) as gateway:
        grant = sign_in(gateway)
        assert me(gateway, grant["access_token"]) == me(gateway, token) == 200
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    with GatewayProcess(folder) as gateway:
        assert me(gateway, grant["access_token"]) == me(gateway, token) == 200
        operator(folder, "user", "disable", "ada")
        assert me(gateway, grant["access_token"]) == 401
        assert me(gateway, token) == 200


def test_logs_and_metrics_of_a_gateway_hold_no_secret_and_no_query(folder: Path) -> None:
    with GatewayProcess(folder) as gateway:
        grant = sign_in(gateway)
        assert me(gateway, grant["access_token"]) == 200
        httpx2.get(f"{gateway.url}/api/nothing-like-{PASSWORD}".replace(" ", "-"), timeout=30)
        metrics = httpx2.get(gateway.metrics_url, timeout=30).text
        assert 'penstock_gateway_requests_total{code="200",method="GET",route="/api/me"}' in metrics
        assert "nothing-like" not in metrics
        assert gateway.end() == 0
    told = gateway.log.read_text()
    assert "serving" in told
    kept = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for secret in (PASSWORD, grant["access_token"], grant["refresh_token"], "in-a-query"):
        assert secret not in told
        assert all(secret.encode() not in content for content in kept)


def test_a_gateway_loads_neither_torch_nor_redis() -> None:
    code = (
        "import json, sys, penstock.launch.gateway.gateway_commands, penstock.gateway.process\n"
        "alone = sorted(sys.modules)\n"
        "import penstock.workloads.goals.http.goals_service, penstock.workloads.rlhf.policy_service\n"
        "print(json.dumps([alone, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    absent = {"torch", "safetensors", "gymnasium", "redis", "hiredis"}
    alone, with_services = map(set, json.loads(done.stdout))
    assert with_services & absent == set()
    absent |= {f"penstock.{room}" for room in ("broker", "actor", "learner", "workloads")}
    assert alone & absent == set()


@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_two_gateways_on_one_database_act_as_one(shared_database: str, tmp_path: Path) -> None:
    options = ("--database", shared_database, "--registry", shared_database, "--keys", str(tmp_path / "keys"))
    with GatewayProcess(tmp_path, *options) as one, GatewayProcess(tmp_path, *options) as other:
        added = operator(
            tmp_path, "user", "add", "ada", "--project", "alpha", *options[:2], *options[4:], stdin=PASSWORD
        )
        assert added.returncode == 0, added.stderr
        grant = sign_in(one)
        assert me(other, grant["access_token"]) == 200
        headers = {"Authorization": f"Bearer {grant['access_token']}"}
        assert httpx2.post(f"{other.url}/api/auth/sign-out", headers=headers, timeout=30).status_code == 204
        assert me(one, grant["access_token"]) == 401


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--database", "postgresql://ada:sesame@host/d"), "everybody on this machine can read a command"),
        (("--listen", "0.0.0.0:0"), "passwords and tokens would travel in plaintext"),
        (("--runner", "kubernetes"), "--runner kubernetes and --cluster FILE come together"),
        (("--cluster", "c.toml"), "--runner kubernetes and --cluster FILE come together"),
        (("--runner", "kubernetes", "--cluster", "c.toml"), "from their pods; name a PostgreSQL"),
        (("--host", "https://gateway.example"), "--host https://gateway.example: write the name alone"),
        (("--quota", "rating=5"), "--quota rating=5: write NAME=NUMBER, with one of the names ratings,"),
        (("--quota", "ratings=-5"), "--quota ratings=-5: write NAME=NUMBER"),
        (("--origin", "*"), "--origin *: write it as browsers do"),
        (("--templates", ".", "--models", "/dev/null"), "--models /dev/null: File exists; name a folder"),
    ],
)
def test_impossible_options_are_explained_in_one_line(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = operator(tmp_path, *words, stdin=f"{PASSWORD}\n")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert "sesame" not in done.stderr


needs_a_disk = pytest.mark.skipif(not can_mount(), reason="needs leave to mount a small disk")
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
    (tmp_path / "models").mkdir()
    with small_disk("tmpfs", tmp_path / "models", lambda: None) as disk:
        yield disk


@pytest.fixture
def gateway(tmp_path: Path) -> SmallGateway:
    runner = LocalRunner(tmp_path / "jobs", write_tiny(tmp_path / "templates"))
    return SmallGateway.in_folder(tmp_path, runner=runner, services=[service()])


def rate(number: int) -> dict[str, Any]:
    return {"prompt": f"question {number}", "response": "yes of course", "score": number % 6 / 5}


def asked(gateway: SmallGateway, editor: dict[str, str], key: str) -> Any:
    headers = editor | {"Prefer": "wait=0", "Idempotency-Key": key}
    return gateway.client.post(TRAIN, json={"maxSteps": 2}, headers=headers)


def trained(gateway: SmallGateway, folder: Path, job: str) -> None:
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
    gateway.dispatcher.look()


@needs_a_disk
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


@needs_a_disk
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
