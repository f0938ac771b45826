"""The capacity formula: its results for exact costs, what saturates first, and its pictures."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from benchmarks import curves
from benchmarks.capacity import Cost, carried, fit, moved_by_one
from benchmarks.experience_path import PROCESSES
from penstock.wire.limits import KIB, MIB


def test_exact_costs_are_found_again() -> None:
    """Two numbers from three sizes that lie on a line."""
    cost = Cost(200e-6, 2e-9)
    found = fit({size: cost.of(size) for size in (16 * KIB, 256 * KIB, MIB)})
    assert found.per_fragment == pytest.approx(cost.per_fragment)
    assert found.per_byte == pytest.approx(cost.per_byte)


def test_neither_cost_is_negative() -> None:
    """Bytes that grow dearer leave nothing for the call; calls that grow cheaper leave nothing for bytes."""
    assert fit({1: 1.0, 10: 20.0}).per_fragment == 0.0
    assert fit({1: 2.0, 10: 1.0}).per_byte == 0.0


@pytest.mark.parametrize(("cores", "expected"), [(1, 250.0), (2, 500.0), (16, 1000 / 3)])
def test_what_saturates_first_is_the_rate(cores: int, expected: float) -> None:
    """All cores together, or one process that has a whole core and cannot use another."""
    costs = {"broker": Cost(3e-3, 0.0), "Redis": Cost(1e-3, 0.0)}
    assert carried(costs, 64 * KIB, cores) == pytest.approx(min(expected, 1000 / 3))


def test_one_actor_waits_for_its_append_but_not_for_the_reader() -> None:
    """Three hops one after another."""
    costs = {hop: Cost(1e-3, 1e-9) for hop in PROCESSES}
    assert moved_by_one(costs, 1e6) == pytest.approx(1 / 6e-3)


def test_pictures_of_both_parts_are_drawn(tmp_path: Path) -> None:
    """From the rows that the tables have; one column or panel for each thing turned."""
    hops: list[list[object]] = [[hop, 300.0, 2.0, 1.0, 1.0] for hop in PROCESSES]
    rows = [["actors", at, 100.0 * at, "MB/s", "GB", "broker", 2.0] for at in (1, 4, 16)]
    drawn = curves.draw({"scaling": {"rows": rows}, "capacity": {"rows": hops}}, tmp_path)
    assert [file.name for file in drawn] == ["scaling.png", "capacity.png"]
    assert all(imread(file).std() > 0 for file in drawn)
