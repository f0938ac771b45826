"""Two trainings of one agent side by side: versions of both answer clients, as arms of one policy."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.client import Arm, Fallback, PolicyClient, TextClient
from penstock.launch.run.supervisor import penstock
from penstock.registry.versions import RANGE
from penstock.runtime.health import read_endpoint
from tests.support.gateway.gateway_stand import JOBS, Client, end_jobs, until
from tests.support.gateway.job_templates import write_templates, write_tiny
from tests.support.run.harness import GatewayProcess

POLICY: Final = "alpha/my_agent"
ROBOT: Final = "alpha/My_agent"
PEOPLE: Final = 24
Answered = dict[str, tuple[Arm | None, int]]
"""Arm and version by person; version 0: the model without an adapter, where the arm's cannot be had."""


@pytest.fixture
def client(tmp_path: Path, token: str) -> Iterator[Client]:
    """An editor, at a gateway that trains, from feedback too."""
    write_tiny(write_templates(tmp_path / "templates"))
    with GatewayProcess(tmp_path, "--templates", "templates", "--models", "models") as gateway:
        yield Client(gateway, token)
    end_jobs(tmp_path)


@contextmanager
def served(folder: Path, job: str) -> Iterator[str]:
    """The address of a server over the run of a job."""
    run = folder / "gateway-state" / "jobs" / job / "run"
    endpoints, log = folder / f"server-{job}.json", log_of(folder, job)
    endpoints.unlink(missing_ok=True)
    words = ("serve", "--run", str(run), "--listen", "127.0.0.1:0", "--endpoints", str(endpoints))
    with log.open("ab") as out:
        server = subprocess.Popen(penstock(*words), cwd=folder, stdin=subprocess.DEVNULL, stderr=out)
    try:
        until(lambda: read_endpoint(endpoints) is not None or server.poll() is not None)
        endpoint = read_endpoint(endpoints)
        assert endpoint is not None, log.read_text()
        yield endpoint.address
    finally:
        server.terminate()
        server.wait()


def log_of(folder: Path, job: str) -> Path:
    return folder / f"server-{job}.log"


def trained(client: Client) -> dict[str, Any]:
    job = client.ended(client.submit("My_agent", steps=8))
    assert job["state"] == "finished", job
    return job


def versions(client: Client, job: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found = client.http.get(f"{JOBS}/{job['id']}/versions").json()["versions"]
    assert {one["policy"] for one in found} == {ROBOT}
    return {one["version"]: one for one in found}


def test_versions_of_two_trainings_answer_as_arms_of_one_policy(client: Client, tmp_path: Path) -> None:
    first, second = trained(client), trained(client)
    known = versions(client, first)
    assert known == versions(client, second)
    by_run = {
        run: [number for number, one in known.items() if one["run"].startswith(run)]
        for run in (first["id"], second["id"])
    }
    assert max(by_run[first["id"]]) <= RANGE < min(by_run[second["id"]])
    (active,) = [number for number, one in known.items() if one["status"] == "active"]
    assert active in by_run[first["id"]]
    canary = max(by_run[second["id"]])
    body = {"version": canary, "to": "canary", "canaryShare": 0.5, "reason": "try"}
    reply = client.http.post(f"{JOBS}/{second['id']}/promote", json=body)
    assert reply.status_code == 200, reply.text
    assert arms(tmp_path, first) == {("active", active), ("canary", canary)}
    for path, asked in (("promote", {"version": canary}), ("rollback", {"version": canary})):
        reply = client.http.post(f"{JOBS}/{second['id']}/{path}", json=asked | {"reason": "a test"})
        assert reply.status_code == 200, reply.text
    (restored,) = [one for one in versions(client, first).values() if one["status"] == "active"]
    for field, wanted in (("parent", active), *((name, known[active][name]) for name in ("sha256", "run"))):
        assert restored[field] == wanted
    assert restored["version"] <= RANGE
    assert arms(tmp_path, second) == {("active", restored["version"])}


def arms(folder: Path, job: dict[str, Any]) -> set[tuple[str, int]]:
    """Which version answers on which arm, at a server over the folder of one of the trainings."""
    with served(folder, job["id"]) as address, PolicyClient(address, policy=ROBOT) as asking:
        answers = [asking.act(np.zeros(4, np.float32), client_key=f"user-{number}") for number in range(32)]
    return {("" if one.arm is None else one.arm.name.lower(), one.version) for one in answers}


@contextmanager
def text_served(folder: Path, job: dict[str, Any]) -> Iterator[TextClient]:
    """A client of a server of text over the run of a job."""
    with served(folder, job["policyId"]) as address, TextClient(address, policy=POLICY) as asking:
        yield asking


def rate(client: Client, first: int, count: int) -> None:
    for number in range(first, first + count):
        body = {"prompt": f"question {number}", "response": "yes of course", "score": number % 6 / 5}
        reply = client.http.post("/api/policies/feedback/my_agent", json=body)
        assert reply.status_code == 200, reply.text


def train(client: Client, **said: Any) -> dict[str, Any]:
    body = {"maxSteps": 4, **said}
    reply = client.http.post("/api/policies/train_policy/my_agent", json=body, timeout=900)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def decide(client: Client, job: dict[str, Any], decision: str, **body: Any) -> None:
    path = f"{JOBS}/{job['policyId']}/{decision}"
    reply = client.http.post(path, json=body | {"reason": "a test"})
    assert reply.status_code == 200, reply.text


def answers(asking: TextClient) -> Answered:
    found: Answered = {}
    for number in range(PEOPLE):
        conversation = asking.start_conversation(f"person-{number}")
        given = conversation.generate([{"role": "user", "content": f"question {number % 12}"}])
        assert (given.version == 0) is (given.fallback is Fallback.ADAPTER_OFF)
        found[f"person-{number}"] = given.arm, given.version
        conversation.end()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_versions_of_two_trainings_from_feedback_answer_as_arms(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="language models need the extra rlhf")
    rate(client, 0, 12)
    first = train(client)
    second = train(client, rewardModel=first["version"], learningRate=1e-3)
    assert (first["version"], second["version"]) == ("v12", "v12.2")
    decide(client, first, "promote", version="v12")
    decide(client, second, "promote", version="v12.2", to="canary", canaryShare=0.5)
    shown = client.http.get(f"{JOBS}/{first['policyId']}/versions").json()["versions"]
    numbers = {one["label"]: one["version"] for one in shown if one["label"]}
    assert numbers["v12"] <= RANGE < numbers["v12.2"]
    both = {(Arm.ACTIVE, numbers["v12"]), (Arm.CANARY, numbers["v12.2"])}
    with text_served(tmp_path, first) as asking:
        found = answers(asking)
        assert set(found.values()) == both
        assert answers(asking) == found
    with text_served(tmp_path, second) as asking:
        assert answers(asking) == found
        decide(client, second, "rollback", version="v12.2")
        until(lambda: set(answers(asking).values()) == {(Arm.ACTIVE, numbers["v12"])})
        rate(client, 12, 3)
        third = train(client)
        decide(client, third, "promote", version=third["version"], to="canary", canaryShare=0.5)
        until(lambda: "another base model" in log_of(tmp_path, second["policyId"]).read_text())
        still = set(answers(asking).values())
        assert (Arm.ACTIVE, numbers["v12"]) in still
        assert still <= {(Arm.ACTIVE, numbers["v12"]), (Arm.CANARY, 0)}
