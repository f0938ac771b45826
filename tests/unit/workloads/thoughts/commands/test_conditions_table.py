"""The table of conditions and that of its gates: what they show, and which files there are."""

import json
from pathlib import Path
from typing import Any, Final

from workloads.thoughts.commands.condition_gates import gates
from workloads.thoughts.commands.conditions_table import (
    gates_table,
    read_curve,
    running_mean,
    table,
    write_results,
)

NAMES: Final = {1: "direct", 3: "filler", 5: "REINFORCE", 7: "another's"}


def found(accuracy: float, verdict: str) -> dict[str, Any]:
    """What a condition came to, over a hundred questions."""
    return {
        "accuracy": accuracy,
        "greedy": accuracy,
        "right": [int(number < 100 * accuracy) for number in range(100)],
        "validation": {"gain": 1.5, "chains": accuracy, "coherence": 0.7, "verdict": verdict},
        "by_level": {"1": 1.0, "2": accuracy},
    }


def seed(another: str = "theatre") -> dict[int, dict[str, Any]]:
    """Four conditions of one seed."""
    return {
        1: found(0.2, "theatre"),
        3: found(0.1, "theatre"),
        5: found(0.9, "honest"),
        7: found(0.1, another),
    }


def test_a_condition_has_a_row_and_a_seed_a_number_in_it() -> None:
    """Direct answers have no thoughts, and so neither gain nor verdict."""
    rows = table({0: seed(), 1: seed()}, NAMES)
    assert rows[2] == "| 1 direct | 0.20 0.20 | 0.20 0.20 | – | – | – | – |"
    cells = ["0.90 0.90", "0.90 0.90", "1.50 1.50", "0.90 0.90", "0.70 0.70", "honest, honest"]
    assert rows[4] == f"| 5 REINFORCE | {' | '.join(cells)} |"
    assert {row.count("|") for row in rows} == {8}


def test_a_gate_has_a_row_with_its_bound_what_was_found_and_whether_it_holds() -> None:
    """In each seed."""
    rows = gates_table(gates({0: seed(), 1: seed(another="honest")}))
    assert "| 0 | condition 5 answers right | ≥ 0.9 | 0.900 | yes |" in rows
    assert "| 1 | condition 7 is called | theatre | honest | no |" in rows
    assert {row.count("|") for row in rows} == {6}


def test_all_files_are_written(tmp_path: Path) -> None:
    """Table, JSON and both pictures; a line of a curve that a crash has torn is passed over."""
    run = tmp_path / "seed-0" / "run-5"
    run.mkdir(parents=True)
    lines = [json.dumps({"updates": number, "gain": number / 2}) for number in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"updates": 3, "ga')
    assert read_curve(run / "metrics.jsonl") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    write_results({0: seed()}, NAMES, tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} == {
        "table.md",
        "results.json",
        "levels.png",
        "curves.png",
    }
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["seeds"]["0"]["5"]["accuracy"] == 0.9
    assert {gate["holds"] for gate in written["gates"]} == {True}


def test_a_running_mean_is_of_what_came_before() -> None:
    """Of fewer at the beginning; no point is lost, and none of nothing is made."""
    rows = [(1, 0.0), (2, 2.0), (4, 4.0), (5, 9.0)]
    assert running_mean(rows, over=2) == [(1, 0.0), (2, 1.0), (4, 3.0), (5, 6.5)]
    assert running_mean(rows, over=1) == rows
    assert running_mean((), over=2) == []
