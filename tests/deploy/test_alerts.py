"""Alerts: they fire when they should, on metrics that exist, and a page says what to do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.runtime import metrics
from penstock.wire.refusal import Reason

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "operations.md"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH")
def test_each_alert_fires_and_is_quiet_as_its_cases_say() -> None:
    """With promtool itself."""
    cases = RULES.with_name("alerts_test.yml")
    done = subprocess.run(["promtool", "test", "rules", cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_both_cases_and_an_entry_in_the_runbook(alert: str) -> None:
    """Firing and quiet; the link leads to a heading."""
    cases = RULES.with_name("alerts_test.yml").read_text()
    assert f"- name: {alert} fires" in cases
    assert f"- name: {alert} is quiet" in cases
    assert f"docs/operations.md#{alert.lower()}" in RULES.read_text()
    assert f"\n### {alert}\n" in PAGE.read_text()


def test_the_runbook_names_no_alert_that_is_not_there() -> None:
    """A heading without an alert would promise a warning that never comes."""
    assert re.findall(r"^### (Penstock\w+)$", PAGE.read_text(), re.MULTILINE) == ALERTS


def test_alerts_ask_for_metrics_that_exist() -> None:
    """A name that nobody exports never fires."""
    exported = {
        name
        for line in metrics.exposition("every role").decode().splitlines()
        if (name := _family(line)) is not None
    }
    asked = {
        re.sub(r"_(sum|bucket|count)$", "", name) for name in re.findall(r"penstock_\w+", RULES.read_text())
    }
    assert asked - exported == set()


def _family(line: str) -> str | None:
    match = re.match(r"# TYPE (penstock_\w+) ", line)
    return match[1] if match else None


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.label)
def test_every_refusal_is_explained(reason: Reason) -> None:
    """A row of the table."""
    assert f"\n| `{reason.name}` |" in PAGE.read_text()
