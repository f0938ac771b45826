"""Who asks for too much waits: each address, and each account wherever it calls from."""

from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.gateway.store.tables import Role
from penstock.rpc.gate import Rates
from tests.support.gateway.small_gateway import SmallGateway

ONE = Rates(calls=1e-6, bytes=1e9)


def test_an_address_that_asks_too_often_waits(tmp_path: Path) -> None:
    urls = (f"sqlite:///{tmp_path}/a.sqlite", f"sqlite:///{tmp_path}/r.sqlite")
    gateway = SmallGateway.at(*urls, tmp_path, address=ONE)
    first, second = gateway.client.get("/api/health"), gateway.client.get("/api/health")
    assert (first.status_code, second.status_code) == (200, 429)
    assert int(second.headers["retry-after"]) >= 1
    assert second.json()["error"] == "too_many"


def test_an_account_that_asks_too_often_waits(tmp_path: Path) -> None:
    urls = (f"sqlite:///{tmp_path}/a.sqlite", f"sqlite:///{tmp_path}/r.sqlite")
    gateway = SmallGateway.at(*urls, tmp_path, account=ONE)
    gateway.person("ada", "alpha", Role.OWNER)
    ada, program = gateway.bearer("ada"), gateway.token("alpha")
    codes = [gateway.get("/api/me", who).status_code for who in (ada, ada, program)]
    assert codes == [200, 429, 200]
