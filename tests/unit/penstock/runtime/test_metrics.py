"""Every metric is declared once, with unit and help."""

import re

import pytest

from penstock.runtime import metrics

PLATFORM = ("process_", "python_")
LABELS = {
    "reason",
    "cause",
    "phase",
    "method",
    "role",
    "evaluation",
    "le",
    "arm",
    "fallback",
    "call",
    "tracker",
    "actions",
    "split",
    "direction",
    "by",
}


def families() -> list[tuple[str, str]]:
    """Name and help of our own families."""
    text = metrics.exposition("every role").decode()
    found = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
    return [(name, words) for name, words in found if not name.startswith(PLATFORM)]


def test_every_metric_has_the_prefix_and_a_help_text() -> None:
    assert len(families()) > 50
    for name, words in families():
        assert re.fullmatch(r"penstock_[a-z][a-z0-9_]*", name), name
        assert len(words) > 10, name


def test_a_process_serves_the_families_of_its_role_alone() -> None:
    actor, learner = (metrics.exposition(role).decode() for role in ("actor", "learner"))
    assert "penstock_outbox_fragments" in actor
    assert "penstock_mean_return" not in actor
    assert "penstock_mean_return" in learner
    assert "penstock_outbox_fragments" not in learner
    assert "penstock_outbox_fragments" not in metrics.exposition("evaluator").decode()
    assert "penstock_log_closed" not in learner
    assert "penstock_log_closed" in metrics.exposition("broker").decode()
    assert "process_resident_memory_bytes" in metrics.exposition("redis").decode()


def test_what_alerts_watch_is_there_before_its_first_event() -> None:
    assert 'penstock_updates_skipped_total{reason="nan"}' in metrics.exposition("learner").decode()
    for reason in ("full", "invalid", "overloaded", "malformed"):
        assert f'penstock_refusals_total{{reason="{reason}"}}' in metrics.exposition("broker").decode()
    assert 'penstock_actor_wait_seconds_total{cause="leave"}' in metrics.exposition("actor").decode()
    # Other tests of this process may have withdrawn some.
    assert re.search(
        r"^penstock_canaries_withdrawn_total \d", metrics.exposition("server").decode(), re.MULTILINE
    )


def test_an_evaluator_does_not_say_which_version_it_acts_with() -> None:
    assert "penstock_weight_version_applied" in metrics.exposition("actor").decode()
    assert "penstock_weight_version_applied" not in metrics.exposition("evaluator").decode()


def test_labels_come_from_small_enumerations() -> None:
    for collector in vars(metrics).values():
        names = getattr(collector, "_labelnames", ())
        assert set(names) <= LABELS, collector


def test_times_and_sizes_carry_their_unit() -> None:
    for name, words in families():
        if ", in seconds" in words:
            assert "_seconds" in name, name
        if ", in bytes" in words:
            assert "_bytes" in name, name


def test_the_service_of_a_workload_serves_families_of_its_own() -> None:
    declared = metrics.declare("tested")
    declared.counter("tested_calls", "Calls that a test made").inc(3)
    assert "penstock_tested_calls_total 3.0" in metrics.exposition("tested").decode()
    assert "penstock_refusals_total" in metrics.exposition("tested").decode()
    assert "penstock_tested_calls" not in metrics.exposition("learner").decode()
    for role in ("tested", "learner"):
        with pytest.raises(ValueError, match=f"role='{role}': has its metrics already"):
            metrics.declare(role)
