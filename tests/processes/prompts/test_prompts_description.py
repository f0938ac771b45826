"""The OpenAPI document of the API of prompts, held against what it answers, by generated calls."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("schemathesis", reason="what generates the calls")

from tests.support.prompts.prompts_gateway import SMALL, PromptsGateway

CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
LEAST: Final = 300


@pytest.mark.timeout(600)
def test_generated_calls_are_answered_as_described(tmp_path: Path) -> None:
    with PromptsGateway(tmp_path, *SMALL) as gateway:
        words = (
            *("run", f"{gateway.url}/openapi.json", "--seed", "7", "--no-color"),
            *("--checks", ",".join(CHECKS), "--max-examples", "30", "--phases", "fuzzing"),
            *("--generation-database", "none"),
        )
        done = subprocess.run(
            [str(Path(sys.executable).with_name("st")), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        told = done.stdout[-8000:] + done.stderr[-2000:]
        assert done.returncode == 0, told
        counted = re.search(r"(\d+) generated", done.stdout)
        assert counted is not None, told
        assert int(counted[1]) >= LEAST, told
        assert gateway.get("/health") == {"status": "ok"}
        assert gateway.end() == 0, gateway.said()
    assert "a request failed" not in gateway.log.read_text()
    assert gateway.summary()["ledger"]["balanced"]
