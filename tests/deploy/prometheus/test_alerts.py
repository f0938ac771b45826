"""Alerts: they fire when they should, on metrics that exist, and a page says what to do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.gateway.frame import envelope
from penstock.protocol.refusal import Reason
from penstock.runtime import metrics
from tests.deploy.manifests import ROOT

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "operations.md"
RECORDED = RULES.with_name("rules.yml")
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
FIRED = "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("test_alerts_fire*.py")))
DECLARED_ELSEWHERE = (envelope,)
"""Declares metrics by being imported."""
with_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH: apt-get install prometheus"
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
@pytest.mark.parametrize("cases", sorted(RULES.parent.glob("*_test.yml")), ids=lambda path: path.stem)
def test_each_rule_gives_the_expected_values(cases: Path) -> None:
    promtool("test", "rules", cases)


@with_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_prometheus_accepts_the_configuration(name: str) -> None:
    promtool("check", "config", RULES.with_name(name))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_both_cases_and_an_entry_in_the_runbook(alert: str) -> None:
    cases = RULES.with_name("alerts_test.yml").read_text()
    assert f"- name: {alert} fires" in cases
    assert f"- name: {alert} is quiet" in cases
    assert f"runbook_url: docs/operations.md#{alert.lower()}\n" in RULES.read_text()
    assert f"\n### {alert}\n" in PAGE.read_text()


@pytest.mark.promise("alert-fires-cause-occurs")
@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_fired_for_real_and_clears(alert: str) -> None:
    for word in ("fires", "clears"):
        assert re.search(rf'scene\.(follows|{word})\([^)]*"{alert}"', FIRED), word


def test_the_runbook_names_no_alert_that_is_not_there() -> None:
    assert re.findall(r"^### (Penstock\w+)$", PAGE.read_text(), re.MULTILINE) == ALERTS


def test_alerts_ask_for_metrics_that_exist() -> None:
    exported = {
        name
        for line in metrics.exposition("every role").decode().splitlines()
        if (name := _family(line)) is not None
    }
    text = RULES.read_text() + RECORDED.read_text()
    asked = {re.sub(r"_(sum|bucket|count)$", "", name) for name in re.findall(r"penstock_\w+", text)}
    assert asked - exported - {"penstock_certificate_expiry_timestamp_seconds"} == set()
    recorded = set(re.findall(r"record: (\S+)", RECORDED.read_text()))
    assert set(re.findall(r"penstock:\w+", text)) == recorded


def _family(line: str) -> str | None:
    match = re.match(r"# TYPE (penstock_\w+) ", line)
    return match[1] if match else None


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.label)
def test_every_refusal_is_explained(reason: Reason) -> None:
    assert f"\n| `{reason.name}` |" in PAGE.read_text()
