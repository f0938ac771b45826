"""What the page shows of an injector is what its files say."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.workloads.goals.injection_journal import (
    FEEDBACK,
    INJECTIONS,
    PULSE,
    STOPPED,
    Beat,
    TooLate,
    last_beat,
    switch,
    veto,
    write_beat,
)
from penstock.workloads.goals.injector_view import view_of

NOW: Final = 1_790_000_000.0


def goal(number: int, *, age_s: float = 60.0, injected: bool = True, held: str = "") -> dict[str, Any]:
    """A line of a goal; its confidence lies in the bin of its number."""
    return {
        "goal_id": f"g{number}", "goal": "trim", "timestamp": NOW - age_s, "reasoning": "sure",
        "priority": 0.5, "confidence": number % 10 / 10 + 0.05, "expected_reward": 1.5,
        "version": 3, "injected": injected, "processed": injected,
        "metadata": {"episode": "e", "step": number, "held": held},
    }  # fmt: skip


def outcome(number: int, *, success: bool | None) -> dict[str, Any]:
    """A line of what became of it."""
    return {
        "goal_id": f"g{number}", "goal": "trim", "success": success, "execution_time_ms": 1.0, "output": "",
        "error": "", "reward": 1.0, "timestamp": NOW,
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> None:
    """Lines of a file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def beat(**said: Any) -> Beat:
    """A beat of an injector that waits four seconds for a veto."""
    given: dict[str, Any] = {
        "at": NOW, "auto": True, "trouble": "", "version": 3, "threshold": 0.7, "explore": 0.0,
        "interval_s": 30.0, "daily_limit": 10, "veto_s": 4.0, "quiet": [],
    } | said  # fmt: skip
    return Beat(**given)


def test_its_day_its_success_and_its_last_goals(tmp_path: Path) -> None:
    old, recent = goal(1, age_s=100_000.0), [goal(number) for number in range(2, 31)]
    held = goal(31, injected=False, held="threshold")
    waiting = goal(32, age_s=1.0, injected=False)
    write(tmp_path / INJECTIONS, old, *recent, held, waiting)
    write(
        tmp_path / FEEDBACK,
        *(outcome(n, success=n % 3 != 0) for n in range(1, 30)),
        outcome(30, success=None),
    )
    write_beat(tmp_path, beat())
    seen = view_of(tmp_path, NOW)
    assert seen["state"] == "running"
    assert seen["day"] == {
        "proposed": 31, "injected": 29, "succeeded": 19, "failed": 9, "held": {"threshold": 1},
        "perHour": 29 / 24,
    }  # fmt: skip
    assert seen["success"] == {"of": 29, "share": 20 / 29}
    assert sum(seen["confidence"]) == 31
    assert seen["confidence"][0] == 3
    assert [one["goal_id"] for one in seen["goals"]] == [f"g{n}" for n in range(32, 12, -1)]
    assert [one["outcome"] for one in seen["goals"][:4]] == [
        "waits",
        "not injected",
        "interrupted",
        "success",
    ]
    assert [one["goal_id"] for one in seen["goals"] if one["mayVeto"]] == ["g32"]


@pytest.mark.parametrize(
    ("said", "later_s", "state"),
    [({}, 0, "running"), ({}, 93, "running"), ({}, 95, "silent"), ({"ended": True}, 0, "ended")],
)
def test_whether_it_lives(tmp_path: Path, said: dict[str, Any], later_s: float, state: str) -> None:
    write(tmp_path / INJECTIONS, goal(1, age_s=0.0, injected=False))
    write_beat(tmp_path, beat(**said))
    seen = view_of(tmp_path, NOW + later_s)
    assert seen["state"] == state
    assert seen["goals"][0]["mayVeto"] is (later_s == 0 and state == "running")


def test_one_that_stopped_itself_says_why(tmp_path: Path) -> None:
    write(tmp_path / STOPPED, {"why": "drift", "timestamp": NOW})
    assert (view_of(tmp_path, NOW)["state"], view_of(tmp_path, NOW)["stopped"]) == ("stopped", "drift")
    write(tmp_path / STOPPED, {"why": "drift", "timestamp": NOW}, {"why": "drift", "resumed": True})
    assert view_of(tmp_path, NOW)["state"] == "ended"


def test_an_empty_folder_and_an_unreadable_pulse_are_shown(tmp_path: Path) -> None:
    (tmp_path / PULSE).write_text('{"at": "soon"')
    assert last_beat(tmp_path) is None
    switch(tmp_path, on=True)
    seen = view_of(tmp_path, NOW)
    assert (seen["state"], seen["auto"], seen["goals"], seen["rules"]) == ("ended", True, [], None)


def test_a_veto_that_comes_too_late_is_told(tmp_path: Path) -> None:
    write(
        tmp_path / INJECTIONS, goal(1), goal(2, injected=False, held="threshold"), goal(3, injected=False),
        goal(4, injected=False, held="veto"),
    )  # fmt: skip
    for late, why in (("g1", "carried out already"), ("g2", "not carried out anyway: threshold")):
        with pytest.raises(TooLate, match=why):
            veto(tmp_path, late)
    for good in ("g3", "g3", "g4"):
        veto(tmp_path, good, "ada")
    write_beat(tmp_path, beat())
    assert [one["goal_id"] for one in view_of(tmp_path, NOW)["goals"] if one["vetoed"]] == ["g3"]
