"""The table of the proof that people get what they like."""

from pathlib import Path

import pytest

from benchmarks.satisfaction import MIXED, write_table
from benchmarks.satisfaction_stage import optimum
from benchmarks.satisfaction_ways import Pleased


def pleased(way: str, seed: int, satisfaction: float) -> Pleased:
    """A result."""
    return Pleased(way=way, seed=seed, satisfaction=satisfaction, error=0.01, kl=1.0, words=5.0, ended=1.0)


def test_ways_stand_in_the_order_of_what_they_come_to(tmp_path: Path) -> None:
    """Means over the seeds, and what stands around the table stays."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- satisfaction -->\nold\n<!-- end of satisfaction -->\nbehind\n")
    write_table(
        [
            pleased("supervised", 0, 0.5),
            pleased(MIXED, 0, 0.4),
            *(pleased("ppo", n, 0.7 + n / 10) for n in (1, 0)),
        ],
        page,
    )
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "behind")
    assert "old" not in lines
    told = [line.split(" | ")[1:3] for line in lines if line.startswith("| ")][2:]
    assert told == [["0.750", "0.700, 0.800"], ["0.500", "0.500"], ["0.400", "0.400"]]


def test_the_best_policy_is_further_from_the_base_where_distance_costs_less() -> None:
    """Between what the base comes to and what the best answer does."""
    found = [optimum(beta) for beta in (10.0, 0.5, 0.1, 0.05)]
    assert found == sorted(found)
    assert found[0][0] == pytest.approx(0.52, abs=0.01)
    assert found[-1][0] < 0.88
