"""Gates of the seven conditions: each holds, and each can fail by itself."""

from typing import Any, Final

import pytest

from workloads.thoughts.commands.condition_gates import Gate, gates, hold

COUNT: Final = 200


def condition(accuracy: float, verdict: str = "theatre", **over: Any) -> dict[str, Any]:
    """What one came to, over two hundred questions."""
    judged = {"gain": 2.0, "chains": 0.95, "verdict": verdict}
    return {
        "accuracy": accuracy,
        "greedy": over.pop("greedy", accuracy),
        "right": [int(number < COUNT * accuracy) for number in range(COUNT)],
        "validation": judged | over,
    }


def good() -> dict[int, dict[str, Any]]:
    """A seed in which all of them hold."""
    without = {number: condition(0.1) for number in (1, 2, 3, 4, 7)}
    return without | {5: condition(0.95, "honest"), 6: condition(0.97, "honest")}


def failing(found: dict[int, dict[str, Any]]) -> list[Gate]:
    """Gates of a seed that do not hold."""
    return [gate for gate in gates({0: found}) if not gate.holds]


def test_all_gates_of_a_good_seed_hold() -> None:
    """Eleven: accuracies, greedy start, gain, chains, difference, two verdicts; the ceiling has none."""
    found = gates({0: good()})
    assert len(found) == 11
    assert hold(found, all_of_them=True)
    assert [gate.name for gate in found if gate.is_verdict] == [
        "condition 3 is called",
        "condition 7 is called",
    ]


@pytest.mark.parametrize(
    ("number", "changed", "name", "value"),
    [
        (5, condition(0.895, "honest"), "condition 5 answers right", "0.895"),
        (1, condition(0.205), "condition 1 answers right", "0.205"),
        (2, condition(0.205), "condition 2 answers right", "0.205"),
        (3, condition(0.205), "condition 3 answers right", "0.205"),
        (4, condition(0.205, greedy=0.1), "condition 4 answers right", "0.205"),
        (4, condition(0.1, greedy=0.92), "condition 4 answers right behind its likeliest thoughts", "0.920"),
        (5, condition(0.95, "honest", gain=1.19), "condition 5 gains, in nats", "1.190"),
        (5, condition(0.95, "honest", chains=0.79), "condition 5 has legal chains", "0.790"),
        (3, condition(0.1, "doubtful"), "condition 3 is called", "doubtful"),
        (7, condition(0.1, "honest"), "condition 7 is called", "honest"),
    ],
)
def test_each_gate_can_fail(number: int, changed: dict[str, Any], name: str, value: str) -> None:
    """By itself; verdicts alone fail the command unless all gates are asked for."""
    found = good() | {number: changed}
    (failed,) = failing(found)
    assert (failed.name, failed.found) == (name, value)
    assert not hold(gates({0: good(), 1: found}), all_of_them=True)
    assert hold(gates({0: good(), 1: found}), all_of_them=False) is not failed.is_verdict


def test_a_difference_is_that_to_the_best_without_trained_thoughts_by_its_lower_end() -> None:
    """0.95 less 0.42 is above a half, and its interval is not."""
    failed = failing(good() | {2: condition(0.42)})
    assert failed[0].name == "condition 2 answers right"
    assert failed[1].name.startswith("condition 5 less condition 2, the best of 1 to 4: ")
    assert failed[1].found == "0.470 (mean 0.530)"
    assert len(failed) == 2


def test_conditions_that_were_not_made_have_no_gate() -> None:
    """Also the difference needs one without trained thoughts."""
    assert gates({0: {6: condition(0.9)}}) == []
    assert len(gates({0: {5: condition(0.95, "honest")}})) == 3
