"""What a service sets before what it is made of is loaded."""

import os
import subprocess
import sys

import pytest

from penstock.launch.commands import service_commands
from penstock.launch.commands.service_commands import SERVING_EXPERIMENTS
from penstock.runtime.foreground import Foreground, SecuredForeground

VARIABLE = "GRPC_EXPERIMENTS"


@pytest.mark.parametrize(
    ("given", "expected"), [(None, SERVING_EXPERIMENTS), ("", ""), ("-tcp_read_chunks", "-tcp_read_chunks")]
)
def test_a_policy_server_chooses_how_it_polls_unless_somebody_else_has(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(Foreground, "run", lambda *_, **__: None)
    service_commands.serve(foreground=SecuredForeground())
    assert os.environ[VARIABLE] == expected


@pytest.mark.parametrize(
    ("experiments", "is_known"), [(SERVING_EXPERIMENTS, True), ("-no_such_thing", False)]
)
def test_grpc_knows_the_experiment(experiments: str, is_known: bool) -> None:
    script = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", VARIABLE: experiments}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert ("Unknown experiment" not in done.stderr) == is_known
