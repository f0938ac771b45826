"""Rewards that came late are kept under episode and step, in order, and not without bound."""

from pathlib import Path

import pytest

from penstock.registry import feedback
from penstock.registry.registry import Registry


def test_late_rewards_are_read_in_order_from_where_a_reader_stopped(tmp_path: Path) -> None:
    """Of one policy, not of another."""
    with Registry.open(f"sqlite:///{tmp_path}/a.sqlite", migrate=True) as registry:
        registry.add_feedback("default", [("s-1-x", 0, 1.5), ("s-1-x", 1, -2.0)])
        registry.add_feedback("other", [("s-2-y", 0, 9.0)])
        registry.add_feedback("default", [("s-3-z", 7, 0.25)])
        first = registry.feedback("default", limit=2)
        rest = registry.feedback("default", after=first[-1].number)
    assert [(row.episode, row.step, row.amount) for row in (*first, *rest)] == [
        ("s-1-x", 0, 1.5),
        ("s-1-x", 1, -2.0),
        ("s-3-z", 7, 0.25),
    ]


def test_the_oldest_feedback_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot fill the disk with rewards."""
    monkeypatch.setattr(feedback, "MAX_KEPT", 10)
    with Registry.open(f"sqlite:///{tmp_path}/a.sqlite", migrate=True) as registry:
        for index in range(25):
            registry.add_feedback("default", [("s-1-x", index, 0.0)])
        assert [row.step for row in registry.feedback("default")] == list(range(15, 25))
