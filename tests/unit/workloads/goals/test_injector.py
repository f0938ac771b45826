import json
import math
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.injection_journal import (
    FEEDBACK,
    INJECTIONS,
    LAST,
    PULSE,
    STOPPED,
    SWITCHES,
    Beat,
    InjectionRules,
    TooLate,
    add_line,
    fit_success,
    is_on,
    is_quiet,
    last_beat,
    last_switch,
    quiet_minutes,
    read_lines,
    reliability,
    switch,
    veto,
    write_beat,
)
from penstock.workloads.goals.injector import NEWEST, NOTHING, Gate, drifted
from penstock.workloads.goals.injector_view import view_of
from tests.support.oracles.logistic_minimum import check_minimum


@pytest.mark.parametrize("default", [False, True])
def test_the_last_switch_counts_and_without_one_the_option(tmp_path: Path, default: bool) -> None:
    assert is_on(tmp_path, default=default) is default
    for wanted in (not default, default, not default):
        switch(tmp_path, on=wanted, by="ada")
        assert is_on(tmp_path, default=default) is wanted
    found = last_switch(tmp_path)
    assert found is not None
    assert (found.on, found.by) == (not default, "ada")


def test_a_line_that_is_no_switch_is_named_and_a_folder_that_is_none_is_not_made(tmp_path: Path) -> None:
    (tmp_path / SWITCHES).write_text('{"on": "perhaps", "timestamp": 1.0}\n')
    with pytest.raises(ConfigurationError, match=r"auto_switches.jsonl: line 1: on='perhaps'"):
        is_on(tmp_path, default=False)
    with pytest.raises(ConfigurationError, match="is no folder"):
        switch(tmp_path / "absent", on=True)
    assert [one.name for one in tmp_path.iterdir()] == [SWITCHES]


def seen(rates: list[tuple[float, int, int]], seed: int = 0) -> tuple[list[bool], list[int]]:
    """Outcomes of (rate, count, version)."""
    random = np.random.default_rng(seed)
    pairs = [(bool(random.random() < rate), version) for rate, count, version in rates for _ in range(count)]
    return [one for one, _ in pairs], [version for _, version in pairs]


def test_a_version_that_fails_more_often_is_named_with_both_counts() -> None:
    successes, versions = seen([(0.9, 200, 1), (0.2, NEWEST, 2)])
    assert "version 2" in drifted(successes, versions)
    assert "of the last 30" in drifted(successes, versions)
    assert not drifted(successes[:203], versions[:203])
    assert drifted(*seen([(0.9, 200, 1), *((0.3, 1, 2 + i) for i in range(NEWEST))])), "one version for each"


@pytest.mark.parametrize(("before", "after", "share"), [(0.9, 0.3, 0.95), (0.8, 0.2, 0.9)])
def test_a_sharp_drop_is_detected_within_thirty_goals(before: float, after: float, share: float) -> None:
    found = 0
    for seed in range(100):
        successes, versions = seen([(before, 200, 1), (after, NEWEST, 2)], seed)
        found += any(drifted(successes[:end], versions[:end]) for end in range(201, 231))
    assert found >= 100 * share


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_rate_and_a_better_one_are_no_drift(seed: int) -> None:
    successes, versions = seen([(0.7, 200, 1), (0.7, 100, 2), (0.9, 100, 3)], seed)
    assert not any(drifted(successes[:count], versions[:count]) for count in range(401))
    assert not drifted([True] * 40 + [False] * 30, [1] * 40 + [2] * 30), "too few goals say nothing"


def test_a_line_cut_anywhere_is_dropped_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first, second = b'{"a":1}\n', b'{"text":"\xc3\xbc"}\n'
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        add_line(path, {"b": 2})
        assert [line for _, line in read_lines(path)] == [{"a": 1}, {"b": 2}]
    path.write_bytes(first + b'{"b":"' + b"x" * 200_000)  # more than is read at once
    add_line(path, {"c": 3})
    assert path.read_bytes() == first + b'{"c":3}\n'


def test_a_line_that_is_no_object_is_named_and_none_is_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for bad in (b"no json\n", b"[1]\n"):
        path.write_bytes(b'{"a":1}\n' + bad)
        with pytest.raises(ConfigurationError, match="line 2"):
            list(read_lines(path))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="Out of range"):
        add_line(path, {"a": float("nan")})
    add_line(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}


ACTIONS: Final = 5
DRAWS: Final = 100_000
SCORES: Final = np.array([0.2, 2.4, 0.0, 0.5, -0.3])
CHANCES: Final = np.exp(SCORES) / np.exp(SCORES).sum()
ADVANTAGE: Final = np.array([-0.2, 0.3, 1.0, -0.5, 0.8])
GATE: Final = Gate(threshold=0.6, explore=0.02, safe=(False, True, True, True, True))


def decided(gate: Gate) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    drawn = random.choice(ACTIONS, size=DRAWS, p=CHANCES)
    found = [
        gate.decide(CHANCES, int(one), float(draw))
        for one, draw in zip(drawn, random.random(DRAWS), strict=True)
    ]
    return np.array([one.action for one in found]), np.array([one.log_prob for one in found])


def distance(actions: np.ndarray, log_probs: np.ndarray) -> float:
    """How many standard errors the weighted gradient is from the exact one, in its worst number."""
    weights = CHANCES[actions] / np.exp(log_probs)
    samples = (weights * ADVANTAGE[actions])[:, None] * (np.eye(ACTIONS)[actions] - CHANCES)
    error = samples.std(0) / np.sqrt(len(samples))
    exact = CHANCES * (ADVANTAGE - CHANCES @ ADVANTAGE)  # of Σ_a π(a) A(a) by the scores of a softmax
    return float(np.abs((samples.mean(0) - exact) / error).max())


def test_the_weighted_gradient_is_that_of_the_policy() -> None:
    actions, log_probs = decided(GATE)
    assert distance(actions, log_probs) < 3
    assert distance(actions, np.log(CHANCES[actions])) > 10
    never = Gate(threshold=0.6, explore=0.0, safe=GATE.safe)
    assert distance(*decided(never)) > 10


def test_an_action_is_done_with_the_probability_that_the_gate_reports() -> None:
    gate = Gate(threshold=0.6, explore=0.3, safe=(False, True, True, False, True))
    done = gate.done_with(CHANCES)
    actions, log_probs = decided(gate)
    counted = np.bincount(actions, minlength=ACTIONS) / DRAWS
    assert done.sum() == pytest.approx(1)
    assert done[3] == counted[3] == 0
    assert done[1] == pytest.approx(CHANCES[1])
    assert (np.abs(counted - done) <= 4 * np.sqrt(done * (1 - done) / DRAWS)).all()
    assert np.exp(log_probs) == pytest.approx(done[actions])


def test_the_gate_gives_its_reason() -> None:
    assert GATE.decide(CHANCES, 2, 0.5).why == "certainty 0.06 < 0.60"
    assert GATE.decide(CHANCES, 2, 0.5).action == NOTHING
    assert GATE.decide(CHANCES, 2, 0.001).why.endswith("tried as one of 2% of safe goals")
    assert GATE.decide(CHANCES, 1, 0.5).why == "certainty 0.71 ≥ 0.60"
    assert GATE.decide(CHANCES, NOTHING, 0.5).why == "the policy would do nothing"


@pytest.mark.parametrize("wrong", [{"threshold": 1.1}, {"explore": -0.1}, {"threshold": float("nan")}])
def test_an_invalid_probability_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a probability"):
        Gate(**({"threshold": 0.7, "explore": 0.02} | wrong), safe=(False, True))


def at(hour: int, minute: int) -> float:
    """A local time of some day, as Unix time."""
    return time.mktime((2026, 3, 10, hour, minute, 0, 0, 0, -1))


def test_quiet_hours_hold_from_their_first_minute_to_before_their_last() -> None:
    for hours, quiet, loud in (
        ("22:00-06:30", [(22, 0), (23, 59), (0, 0), (6, 29)], [(6, 30), (12, 0), (21, 59)]),
        ("12:00-13:00", [(12, 0), (12, 59)], [(13, 0), (11, 59), (0, 0)]),
    ):
        assert all(is_quiet(hours, at(*one)) for one in quiet)
        assert not any(is_quiet(hours, at(*one)) for one in loud)


@pytest.mark.parametrize("bad", ["", "22-6", "24:00-06:00", "22:00-06:60", "22:00-22:00", "22:00–06:00"])
def test_invalid_hours_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="quiet hours"):
        quiet_minutes(bad)


def test_the_first_rule_that_forbids_is_reported() -> None:
    rules = InjectionRules(threshold=0.7, explore=0.0, daily_limit=3, quiet=["22:00-06:00"])
    assert rules.forbids(at(12, 0), 0, auto=False) == "auto is off"
    assert rules.forbids(at(23, 0), 0, auto=True) == "quiet hours"
    assert rules.forbids(at(12, 0), 3, auto=True) == "daily limit"
    assert rules.forbids(at(12, 0), 2, auto=True) == ""


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
    return {
        "goal_id": f"g{number}", "goal": "trim", "success": success, "execution_time_ms": 1.0, "output": "",
        "error": "", "reward": 1.0, "timestamp": NOW,
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def beat(**said: Any) -> Beat:
    given: dict[str, Any] = {
        "at": NOW, "auto": True, "trouble": "", "version": 3, "threshold": 0.7, "explore": 0.0,
        "interval_s": 30.0, "daily_limit": 10, "veto_s": 4.0, "quiet": [],
    } | said  # fmt: skip
    return Beat(**given)


def test_the_page_shows_the_day_the_success_and_the_last_goals(tmp_path: Path) -> None:
    old, recent = goal(1, age_s=100_000.0), [goal(number) for number in range(2, 31)]
    held = goal(31, injected=False, held="threshold")
    waiting = goal(32, age_s=1.0, injected=False)
    write(tmp_path / INJECTIONS, old, *recent, held, waiting)
    known = [outcome(number, success=number % 3 != 0) for number in range(1, 30)]
    write(tmp_path / FEEDBACK, *known, outcome(30, success=None))
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
    outcomes = [one["outcome"] for one in seen["goals"][:4]]
    assert outcomes == ["waits", "not injected", "interrupted", "success"]
    assert [one["goal_id"] for one in seen["goals"] if one["mayVeto"]] == ["g32"]


@pytest.mark.parametrize(
    ("said", "later_s", "state"),
    [({}, 0, "running"), ({}, 93, "running"), ({}, 95, "silent"), ({"ended": True}, 0, "ended")],
)
def test_the_page_shows_whether_an_injector_lives(
    tmp_path: Path, said: dict[str, Any], later_s: float, state: str
) -> None:
    write(tmp_path / INJECTIONS, goal(1, age_s=0.0, injected=False))
    write_beat(tmp_path, beat(**said))
    seen = view_of(tmp_path, NOW + later_s)
    assert seen["state"] == state
    assert seen["goals"][0]["mayVeto"] is (later_s == 0 and state == "running")


def test_an_empty_folder_an_unreadable_pulse_and_why_it_stopped_are_shown(tmp_path: Path) -> None:
    (tmp_path / PULSE).write_text('{"at": "soon"')
    assert last_beat(tmp_path) is None
    switch(tmp_path, on=True)
    seen = view_of(tmp_path, NOW)
    assert (seen["state"], seen["auto"], seen["goals"], seen["rules"]) == ("ended", True, [], None)
    drift = {"why": "drift", "timestamp": NOW}
    write(tmp_path / STOPPED, drift)
    assert (view_of(tmp_path, NOW)["state"], view_of(tmp_path, NOW)["stopped"]) == ("stopped", "drift")
    write(tmp_path / STOPPED, drift, {"why": "drift", "resumed": True})
    assert view_of(tmp_path, NOW)["state"] == "ended"


def test_a_veto_that_comes_too_late_is_reported(tmp_path: Path) -> None:
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


def outcomes(count: int, seed: int = 0) -> tuple[list[float], list[bool]]:
    """Goals of an overconfident policy: success = σ(−0.5 + 0.6 logit π)."""
    random = np.random.default_rng(seed)
    certainty = random.uniform(0.3, 0.99, count)
    chance = 1 / (1 + np.exp(0.5 - 0.6 * np.log(certainty / (1 - certainty))))
    return certainty.tolist(), (random.random(count) < chance).tolist()


def test_the_fit_of_success_is_calibrated_on_unseen_outcomes() -> None:
    fit = fit_success(*outcomes(LAST, seed=1))
    certainty, success = outcomes(LAST, seed=2)
    fitted = reliability([fit.at(one) for one in certainty], success)
    plain = reliability(certainty, success)
    assert fitted is not None
    assert plain is not None
    assert fitted["gap"] < 0.1 < plain["gap"]
    assert fitted["brier"] < plain["brier"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("odd", "well", "usual"),
    [
        ([-3.16, -7.8, 4.83], [True, False, True], [True] * 17),  # whole Newton steps end at 19,000
        ([-0.23, -4.0, 3.53], [True, False, True], [True] * 181 + [False] * 16),
        ([-5.36, -6.59], [True, False], [True] * 182 + [False] * 16),
        ([], [], [True] * 200),
        ([], [], [False] * 20),
        ([8.0] * 10 + [-8.0] * 10, [True] * 10 + [False] * 10, [True]),
    ],
)
def test_no_outcomes_make_a_fit_overflow_or_miss_the_minimum(
    odd: list[float], well: list[bool], usual: list[bool]
) -> None:
    logits, success = [*odd, *(8.0 for _ in usual)], [*well, *usual]
    fit = fit_success([1 / (1 + math.exp(-one)) for one in logits], success)
    inputs = [(1.0, one) for one in logits]
    check_minimum(inputs, success, [1e-3, 1.0], [0.0, 0.0], [fit.offset, fit.slope])
    assert all(0 <= fit.at(one) <= 1 for one in (0.0, 1e-300, 0.5, 1 - 1e-16, 1.0))


def test_the_last_outcomes_alone_count_and_few_are_a_rate() -> None:
    certainty, success = outcomes(LAST)
    assert fit_success([0.5] * 300 + certainty, [False] * 300 + success) == fit_success(certainty, success)
    assert fit_success([], []).at(0.9) == pytest.approx(0.5)
    assert fit_success([0.9] * 3, [True] * 3).at(0.1) == pytest.approx(4 / 5)
    always = fit_success([0.0, 1.0] * 30, [True] * 60)
    assert 0.9 < always.at(1.0) < 1
    assert math.isfinite(always.slope)
    assert reliability([0.5] * 19, [True] * 19) is None
