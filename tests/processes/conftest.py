"""Fixtures of tests that start services."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, Training, trainings


@pytest.fixture
def broker(redis_url: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that is ready."""
    with harness.broker(redis_url, tmp_path / "broker") as started:
        yield started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules are found here and by every process that is started meanwhile."""
    monkeypatch.syspath_prepend(tmp_path)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path
