"""Two trainings of one agent from its feedback: a server of text answers with versions of both, as arms."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")
pytest.importorskip("peft", reason="language models need the extra rlhf")

from penstock.client import Arm, Fallback, TextClient
from penstock.launch.run.supervisor import penstock
from penstock.registry.versions import RANGE
from penstock.runtime.health import read_endpoint
from tests.processes.gateway.test_gateway_process import new_token
from tests.processes.gateway.test_jobs import JOBS, Client, until
from tests.support.gateway.job_templates import end_jobs, write_tiny
from tests.support.run.harness import GatewayProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
POLICY: Final = "alpha/my_agent"
PEOPLE: Final = 24
Answered = dict[str, tuple[Arm | None, int]]
"""Arm and version by person; version 0: the model without an adapter, where the arm's cannot be had."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """An editor, at a gateway that trains from feedback."""
    write_tiny(tmp_path / "templates")
    token = new_token(tmp_path, "alpha")
    with GatewayProcess(tmp_path, "--templates", "templates", "--models", "models") as gateway:
        yield Client(gateway, token)
    end_jobs(tmp_path)


def rate(client: Client, first: int, count: int) -> None:
    """So many ratings, of questions from number `first` on."""
    for number in range(first, first + count):
        body = {"prompt": f"question {number}", "response": "yes of course", "score": number % 6 / 5}
        reply = client.http.post("/api/policies/feedback/my_agent", json=body)
        assert reply.status_code == 200, reply.text


def train(client: Client, **said: Any) -> dict[str, Any]:
    """What the service answers when it has trained."""
    body = {"maxSteps": 4, **said}
    reply = client.http.post("/api/policies/train_policy/my_agent", json=body, timeout=900)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def decide(client: Client, job: dict[str, Any], decision: str, **body: Any) -> None:
    """What an editor does with a version."""
    path = f"{JOBS}/{job['policyId']}/{decision}"
    reply = client.http.post(path, json=body | {"reason": "a test"})
    assert reply.status_code == 200, reply.text


@contextmanager
def serving(folder: Path, job: dict[str, Any]) -> Iterator[TextClient]:
    """A client of a server of text over the run of a job."""
    run = folder / "gateway-state" / "jobs" / job["policyId"] / "run"
    endpoints, log = folder / f"server-{job['policyId']}.json", log_of(folder, job)
    words = ("serve", "--run", str(run), "--listen", "127.0.0.1:0", "--endpoints", str(endpoints))
    with log.open("ab") as out:
        server = subprocess.Popen(penstock(*words), cwd=folder, stdin=subprocess.DEVNULL, stderr=out)
    try:
        until(lambda: read_endpoint(endpoints) is not None or server.poll() is not None)
        endpoint = read_endpoint(endpoints)
        assert endpoint is not None, log.read_text()
        with TextClient(endpoint.address, policy=POLICY) as asking:
            yield asking
    finally:
        server.terminate()
        server.wait()


def log_of(folder: Path, job: dict[str, Any]) -> Path:
    """What the server over the run of a job says."""
    return folder / f"server-{job['policyId']}.log"


def answers(asking: TextClient) -> Answered:
    """Who answers each of the people, by name and by number."""
    found: Answered = {}
    for number in range(PEOPLE):
        conversation = asking.start_conversation(f"person-{number}")
        given = conversation.generate([{"role": "user", "content": f"question {number % 12}"}])
        assert (given.version == 0) is (given.fallback is Fallback.ADAPTER_OFF)
        found[f"person-{number}"] = given.arm, given.version
        conversation.end()
    return found


def test_versions_of_two_trainings_from_feedback_answer_as_arms(client: Client, tmp_path: Path) -> None:
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
    with serving(tmp_path, first) as asking:
        found = answers(asking)
        assert set(found.values()) == both
        assert answers(asking) == found
    with serving(tmp_path, second) as asking:
        assert answers(asking) == found
        decide(client, second, "rollback", version="v12.2")
        until(lambda: set(answers(asking).values()) == {(Arm.ACTIVE, numbers["v12"])})
        rate(client, 12, 3)
        third = train(client)
        decide(client, third, "promote", version=third["version"], to="canary", canaryShare=0.5)
        until(lambda: "another base model" in log_of(tmp_path, second).read_text())
        still = set(answers(asking).values())
        assert (Arm.ACTIVE, numbers["v12"]) in still
        assert still <= {(Arm.ACTIVE, numbers["v12"]), (Arm.CANARY, 0)}
