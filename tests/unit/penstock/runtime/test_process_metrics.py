"""Every process tells of itself what does not depend on its role."""

import re
import time
from pathlib import Path

import pytest

from penstock.launch.commands.certificates import main as certificates
from penstock.launch.commands.request import Order
from penstock.runtime import metrics
from penstock.runtime import metrics as process_metrics


def expiry() -> float | None:
    """What is told of the certificate."""
    text = metrics.exposition("broker").decode()
    found = re.search(r"^penstock_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_a_certificate_tells_when_it_runs_out_also_when_it_was_replaced(tmp_path: Path) -> None:
    assert expiry() is None
    certificate = tmp_path / "broker.pem"
    process_metrics.watch_certificate(certificate)
    try:
        assert expiry() == 0
        for days in (10.0, 90.0):
            certificates(Order(folder=tmp_path, run="run-a", days=days))
            assert expiry() == pytest.approx(time.time() + days * 86_400, abs=3_600)
        certificate.write_text("no certificate")
        assert expiry() == 0
    finally:
        process_metrics.watch_certificate(None)
    assert expiry() is None
