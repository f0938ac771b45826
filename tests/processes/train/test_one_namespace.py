"""A run loads no module of ours under a name that a user's own module may have."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.run.harness import Training

BARE: Final = {"actor", "broker", "gateway", "launch", "learner", "recipes", "workloads"}
OURS: Final = {"penstock.launch.run.run", "penstock.learner.learner"}


def test_every_module_of_a_run_is_below_penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    code, _, said = Training(tmp_path / "run", "CartPole-v1", "--total-steps", "4096").end()
    assert code == 0
    logs = [said, *(file.read_text() for file in (tmp_path / "run" / "logs").iterdir())]
    loaded = set(re.findall(r"^import time: .*\| +([\w.]+)$", "\n".join(logs), flags=re.MULTILINE))
    assert loaded >= OURS
    assert {name.partition(".")[0] for name in loaded} & BARE == set()
