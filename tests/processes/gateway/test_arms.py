"""Two trainings of one agent side by side: versions of both answer clients, as arms of one policy."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import numpy as np

from penstock.client import PolicyClient
from penstock.launch.run.supervisor import penstock
from penstock.registry.versions import RANGE
from penstock.runtime.health import read_endpoint
from tests.processes.gateway.test_gateway_process import new_token
from tests.processes.gateway.test_jobs import JOBS, Client, until
from tests.support.gateway.job_templates import end_jobs, write_templates
from tests.support.run.harness import GatewayProcess

POLICY = "alpha/My_agent"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """An editor, at a gateway that trains."""
    write_templates(tmp_path / "templates")
    token = new_token(tmp_path, "alpha")
    with GatewayProcess(tmp_path, "--templates", "templates") as gateway:
        yield Client(gateway, token)
    end_jobs(tmp_path)


def trained(client: Client) -> dict[str, Any]:
    """A training of the agent that has finished."""
    job = client.ended(client.submit("My_agent", steps=8))
    assert job["state"] == "finished", job
    return job


def versions(client: Client, job: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """All versions of the agent's policy by number, as one of its jobs shows them."""
    found = client.http.get(f"{JOBS}/{job['id']}/versions").json()["versions"]
    assert {one["policy"] for one in found} == {POLICY}
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
    run = folder / "gateway-state" / "jobs" / job["id"] / "run"
    endpoints = folder / f"server-{job['id']}.json"
    words = ("serve", "--run", str(run), "--listen", "127.0.0.1:0", "--endpoints", str(endpoints))
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(penstock(*words), cwd=folder, stdin=subprocess.DEVNULL, stderr=log)
    try:
        until(lambda: read_endpoint(endpoints) is not None or server.poll() is not None)
        endpoint = read_endpoint(endpoints)
        assert endpoint is not None, (folder / "server.log").read_text()
        with PolicyClient(endpoint.address, policy=POLICY) as asking:
            answers = [
                asking.act(np.zeros(4, np.float32), client_key=f"user-{number}") for number in range(32)
            ]
        return {("" if one.arm is None else one.arm.name.lower(), one.version) for one in answers}
    finally:
        server.terminate()
        server.wait()
