"""Runs as curves and as pictures."""

import itertools
import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from penstock.launch.commands.plot import draw
from penstock.launch.inspection.curve import Curve, Point, rates


def row(steps: int, value: float | None = None, seconds: float = 0.0) -> dict[str, object]:
    """A line of `metrics.jsonl`."""
    return {
        "env_steps": steps,
        "mean_return": value,
        "staleness_p50": 1,
        "updates": steps,
        "training_seconds": seconds,
    }


def write(path: Path, *rows: dict[str, object]) -> Path:
    """Add whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)
    return path


def returns(points: list[Point]) -> list[tuple[int, float | None]]:
    """Steps and return."""
    return [(point.env_steps, point.mean_return) for point in points]


def test_steps_that_a_resumed_learner_did_again_count_once(tmp_path: Path) -> None:
    rows = [row(1, 1.0), row(2, None), row(3, 3.0), row(4, 4.0), row(3, 3.5), row(5, 5.0)]
    curve = Curve(write(tmp_path / "metrics.jsonl", *rows))
    assert returns(curve.poll()) == [(1, 1.0), (2, None), (3, 3.5), (5, 5.0)]


def test_a_curve_grows_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curve = Curve(path)
    assert curve.poll() == []
    write(path, row(1, float("nan")))
    with path.open("a") as file:
        file.write('{"env_st\n{"env_steps": 2, "mean_re')
        file.flush()
        assert returns(curve.poll()) == [(1, None)]
        file.write('turn": 7.5}\n')
    assert returns(curve.poll()) == [(1, None), (2, 7.5)]


def test_a_file_that_begins_anew_is_a_new_curve(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", row(1, 1.0), row(2, 2.0))
    curve = Curve(path)
    curve.poll()
    path.unlink()
    assert curve.poll() == []
    write(path, row(7, 7.0))
    assert returns(curve.poll()) == [(7, 7.0)]


@pytest.mark.parametrize("lines", [10, 11, 99, 1000])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_long_run_is_thinned_evenly_and_keeps_its_newest_line(
    tmp_path: Path, lines: int, chunk: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    curve = Curve(path, max_points=10)
    for begin in range(0, lines, chunk):
        write(path, *(row(step, float(step)) for step in range(begin, min(lines, begin + chunk))))
        points = curve.poll()
    steps = [point.env_steps for point in points]
    assert (steps[0], steps[-1]) == (0, lines - 1)
    assert 5 <= len(steps) <= 12
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps[:-1])}
    assert len(gaps) == 1


def test_a_line_without_an_update_knows_no_staleness(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", row(0), row(64), row(128) | {"updates": 64})
    assert [point.staleness for point in Curve(path).poll()] == [None, 1.0, None]


def test_a_rate_is_taken_over_the_stretch_before_its_point(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, row(0), row(100, None, 2.0), row(400, None, 3.0), row(500, None, 3.0))
    assert rates(Curve(path).poll()) == [None, 50.0, 300.0, None]
    assert rates([]) == []


def test_runs_of_any_length_are_overlaid_in_one_picture(tmp_path: Path) -> None:
    for name, length in {"a": 200, "b": 60, "c": 0}.items():
        write(tmp_path / name / "metrics.jsonl", *(row(64 * n, float(n), 0.25 * n) for n in range(length)))
    one, three = tmp_path / "one.png", tmp_path / "three.png"
    draw([tmp_path / "c"], one)
    draw([tmp_path / "a", tmp_path / "b", tmp_path / "c"], three)
    assert imread(three).shape[0] > imread(one).shape[0]
    pixels = (255 * imread(three)[..., :3]).round().astype(int)
    assert all((pixels == colour).all(-1).any() for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)))
