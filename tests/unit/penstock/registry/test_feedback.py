"""Rewards that came late are kept under episode and step, in order, and not without bound."""

from pathlib import Path

import pytest

from penstock.registry import feedback
from penstock.registry.registry import Registry
from tests.support.storage.ready_tables import with_registry


def test_late_rewards_are_read_in_order_from_where_a_reader_stopped(tmp_path: Path) -> None:
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
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
    monkeypatch.setattr(feedback, "MAX_KEPT", 10)
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
        for index in range(25):
            registry.add_feedback("default", [("s-1-x", index, 0.0)])
        assert [row.step for row in registry.feedback("default")] == list(range(15, 25))


@pytest.mark.promise("clients-cannot-exhaust-server")
def test_a_caller_pushes_out_its_own_rewards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_KEPT_PER_CALLER", 10)
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
        registry.add_feedback("default", [("s-1-x", step, 0.0) for step in range(5)], caller="quiet")
        for first in range(100, 160, 7):
            late = [("s-2-y", step, 0.0) for step in range(first, first + 7)]
            registry.add_feedback("default", late, caller="loud")
        kept = [(row.episode, row.step) for row in registry.feedback("default")]
    assert [step for episode, step in kept if episode == "s-1-x"] == list(range(5))
    assert [step for episode, step in kept if episode == "s-2-y"] == list(range(153, 163))


def test_who_has_most_makes_room_for_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_KEPT", 20)
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
        registry.add_feedback("al/quiet", [("s-1-x", step, 0.0) for step in range(5)], caller="ada")
        registry.add_feedback("alone", [("s-1-x", step, 0.0) for step in range(5)])
        for step in range(100):
            policy, caller = f"alpha/agent-{step % 7}", f"user-{step}"
            registry.add_feedback(policy, [("s-2-y", step, 0.0)], caller=caller)
        kept = {
            policy: [row.step for row in registry.feedback(policy)]
            for policy in ("al/quiet", "alone", *(f"alpha/agent-{number}" for number in range(7)))
        }
    assert kept.pop("al/quiet") == kept.pop("alone") == list(range(5))
    assert sorted(step for steps in kept.values() for step in steps) == list(range(90, 100))


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (("x" * 49, 0, 0.0), "of 49 characters"),
        (("", 0, 0.0), "of 0 characters"),
        (("s-1-x", 2**63, 0.0), "step=9223372036854775808"),
        (("s-1-x", 0, float("nan")), "amount=nan"),
    ],
)
def test_a_reward_out_of_bounds_is_refused_with_all_beside_it(
    tmp_path: Path, reward: tuple[str, int, float], why: str
) -> None:
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
        with pytest.raises(ValueError, match=why):
            registry.add_feedback("default", [("s-1-x", 1, 1.0), reward])
        assert not registry.feedback("default")
