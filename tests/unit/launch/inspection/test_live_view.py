"""What a person sees, and the figures behind it."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.launch.inspection.curve import MetricsTail, Progress
from penstock.launch.inspection.live_view import LiveView, PlainView, make_view

HALF_WAY = Progress(
    env_steps=75_000,
    updates=36,
    publications=37,
    steps_per_second=61_234.5,
    mean_return=231.25,
    staleness_p50=1.0,
    outstanding=2048,
    budget=4096,
    log_bytes=3 * 1024 * 1024,
)


def row(steps: int, value: float | None) -> dict[str, object]:
    """A line of `metrics.jsonl`."""
    return {"env_steps": steps, "mean_return": value, "staleness_p50": 1, "updates": 2}


def test_plain_lines_say_all_figures_once_in_a_while() -> None:
    stream = io.StringIO()
    with PlainView(stream, total_steps=150_000, target=475.0) as view:
        view.event("training")
        view.show(HALF_WAY)
        view.show(HALF_WAY)
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" training")
    assert second.split(" ", 1)[1] == (
        "steps 75,000/150,000  rate 61,234/s  return 231.2 of 475  staleness 1.0  buffer 50% 3.0 MiB  "
        "updates 36  publications 37"
    )


def test_a_run_that_stands_still_writes_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.launch.inspection.live_view.PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with PlainView(stream, total_steps=None, target=None) as view:
        for seconds in (10.0, 12.0, 14.0):
            view.show(replace(HALF_WAY, training_seconds=seconds))
        view.show(replace(HALF_WAY, updates=37))
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_gets_a_bar_with_the_figures_below() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with LiveView(console, "cartpole-v1-abc", total_steps=150_000, target=475.0) as view:
        view.show(HALF_WAY)
        view.event("actor-0 died (signal 9), restarting: no [dim] in [1, 2] and no [/bold]")
    text = stream.getvalue()
    for words in (
        "cartpole-v1-abc",
        "75,000/150,000",
        "231.2 of 475",
        "61,234/s",
        "50% 3.0 MiB",
        "signal 9",
        "no [dim] in [1, 2] and no [/bold]",
    ):
        assert words in text


def test_what_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(make_view(io.StringIO(), "x", None, None), PlainView)


def test_unknown_figures_are_dashes() -> None:
    stream = io.StringIO()
    with PlainView(stream, total_steps=None, target=None) as view:
        view.show(Progress())
    assert "return –" in stream.getvalue()


def test_a_line_that_is_still_being_written_is_read_next_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(1, 1.0)) + "\n")
    tail = MetricsTail(path)
    assert tail.poll() is None
    text = json.dumps(row(1, None)) + "\n" + json.dumps(row(2, None)) + "\n"
    with path.open("a") as file:
        file.write(text[:-10])
        file.flush()
        assert tail.poll() is None
        file.write(text[-10:])
        file.flush()
    progress = tail.poll()
    assert progress is not None
    assert (progress.env_steps, progress.staleness_p50) == (2, 1.0)


def test_a_line_that_a_killed_learner_has_torn_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    whole, torn = json.dumps(row(3, 1.0)) + "\n", json.dumps(row(4, 1.0))[:25] + "\n"
    path.write_text(torn + whole + torn)
    progress = tail.poll()
    assert progress is not None
    assert progress.env_steps == 3


def test_a_learner_that_waits_for_experience_is_not_training(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    nothing = {"env_steps": 0, "updates": 0, "outstanding": 0}
    path.write_text(2 * (json.dumps(nothing) + "\n"))
    assert tail.poll() is None
    with path.open("a") as file:
        file.write(json.dumps(nothing | {"outstanding": 256}) + "\n")
    assert tail.poll() is not None
