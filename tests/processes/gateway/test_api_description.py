"""The OpenAPI document of a gateway, held against what it answers: by generated calls, in chains of calls."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("schemathesis", reason="what generates the calls")

import httpx2

from tests.support.gateway import generated_callers
from tests.support.gateway.gateway_stand import PASSWORD, end_jobs, operator, sign_in
from tests.support.gateway.job_templates import write_templates
from tests.support.run.harness import GatewayProcess

SERVICE: Final = Path(__file__).parents[3] / "penstock" / "recipes" / "service" / "rlhf.toml"
CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
ENDS_THE_CALLER: Final = "/(sign-out|password|log|events)$"
"""What ends the session that calls, or answers as long as its caller listens."""
CONFIGURATION: Final = """
[parameters]
"path.project" = "alpha"

[generation]
max-examples = {examples}

[[operations]]
include-path = ["/api/projects/{{project}}/estimates", "/api/policies/train_policy/{{agent_id}}"]
generation.max-examples = 10

[phases.stateful.inference]
algorithms = []
"""
"""Names that are made up are those of no project: all such calls would be answered by 404.

A call that trains for some seconds is made up less often than others.
Of links those that the document has are followed. Those that are guessed from names of fields take one kind
of id for another, and are followed in place of the others.
"""
STORES: Final = {
    *(f"agents/{{agent_id}}/{name}" for name in ("pairs", "late-rewards", "links", "conversations")),
    "tokens",
    "invitations",
}
"""Routes of which some calls must get through to what they are about."""
UNSENT: Final = "POST /api/projects/{project}/agents/{agent_id}/feedback"
"""Its body is JSON lines, which schemathesis does not write."""


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("examples", "least", "links", "phases"),
    [
        (10, 300, 1, "fuzzing,stateful"),  # examples begin trainings, which go on beside all other calls
        pytest.param(200, 10_000, 10, "examples,coverage,fuzzing,stateful", marks=pytest.mark.slow),
    ],
)
def test_generated_calls_are_answered_as_described(
    tmp_path: Path, examples: int, least: int, links: int, phases: str
) -> None:
    shutil.copy(SERVICE, write_templates(tmp_path / "templates"))
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION.format(examples=examples))
    operator(tmp_path, "user", "add", "ada", "--project", "alpha", stdin=f"{PASSWORD}\n")
    try:
        with GatewayProcess(tmp_path, "--templates", "templates", "--proxy", "127.0.0.1") as gateway:
            prepare(gateway, sign_in(gateway)["access_token"])
            words = (
                *("run", f"{gateway.url}/api/openapi.json", "--seed", "7", "--no-color"),
                *("--header", "Penstock-Project: alpha", "--header", "Prefer: wait=0"),
                *("--checks", ",".join(CHECKS), "--phases", phases),
                *("--exclude-path-regex", ENDS_THE_CALLER, "--exclude-name", UNSENT),
                *("--rate-limit", "80/s", "--generation-database", "none"),
                *("--request-timeout", "600"),  # a dry run trains for some seconds, longer on a busy machine
            )
            hooks = {
                "SCHEMATHESIS_HOOKS": generated_callers.__name__,
                "PYTHONPATH": str(Path(__file__).parents[3]),
                generated_callers.URL: gateway.url,
                generated_callers.PASSWORD: PASSWORD,
            }
            done = subprocess.run(
                [str(Path(sys.executable).with_name("st")), *words],
                cwd=tmp_path,
                env=os.environ | hooks,
                capture_output=True,
                text=True,
                check=False,
            )
            told = done.stdout[-8000:] + done.stderr[-2000:]
            assert done.returncode == 0, told
            counted = re.search(r"(\d+) generated", done.stdout)
            assert counted is not None, told
            assert int(counted[1]) >= least, told
            covered = re.search(r"API Links: +(\d+) covered", done.stdout)
            assert covered is not None, told
            assert int(covered[1]) >= links, told
            assert stored(gateway) >= STORES
            assert httpx2.get(f"{gateway.url}/api/health", timeout=30).status_code == 200
        assert "a request failed" not in gateway.log.read_text()
    finally:
        end_jobs(tmp_path)


def stored(gateway: GatewayProcess) -> set[str]:
    told = httpx2.get(gateway.metrics_url, timeout=30).text
    return set(
        re.findall(r'requests_total{code="201",method="POST",route="/api/projects/{project}/([^"]+)"', told)
    )


def prepare(gateway: GatewayProcess, token: str) -> None:
    lines = "\n".join(
        json.dumps({"prompt": f"question {number}", "response": "yes", "score": 0.5}) for number in range(12)
    )
    headers = {"Authorization": f"Bearer {token}"}
    with httpx2.Client(base_url=f"{gateway.url}/api/projects/alpha", headers=headers, timeout=30) as client:
        for reply in (
            client.post("/agents/0/feedback", content=lines),
            client.post("/jobs", json={"agent": "0", "template": "quick"}),
        ):
            assert reply.status_code == 201, reply.text


def test_the_one_declared_500_is_of_a_training_that_failed(tmp_path: Path) -> None:
    write_templates(tmp_path / "templates")
    with GatewayProcess(tmp_path, "--templates", "templates") as gateway:
        document = httpx2.get(f"{gateway.url}/api/openapi.json", timeout=30).json()
    declared = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if {status for status in operation["responses"] if status.startswith("5")} - {"503"}
    }
    assert declared == {"POST /api/policies/train_policy/{agent_id}"}
