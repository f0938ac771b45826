from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run.broker_process import BrokerProcess, eventually, launch


@pytest.fixture
def broker(redis_url: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    process = launch(redis_url, tmp_path)
    eventually(process.is_ready, "readiness of the broker", within_s=60)
    yield process
    process.end()
