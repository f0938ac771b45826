"""Clocks that jump an hour, there and back, under actors, broker and learner: nothing changes its meaning.

Leases and sessions are judged by Redis's clock, waits by monotonic ones; the wall clock may only be shown.
The jump is made by a `sitecustomize` on the processes' path (`tests/support/fleet/clock`); Redis keeps the
kernel's time.
"""

import json
import os
import random
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support.fleet.fleet import ROOT, Fleet, Shape
from tests.support.fleet.learner_books import Versions, View, check_trained_once, last_on_disk

HOUR_S: Final = 3600
CLOCK: Final = ROOT / "tests" / "support" / "fleet" / "clock"
SHAPE: Final = Shape(
    actors=2,
    brokers=1,
    settings=(
        "learner.lease_ttl_s=5",
        "broker.session_timeout_s=20",
        "algorithm.stale_after=8",
        "learner.checkpoint_interval_s=0.2",
    ),
)
UPDATES: Final = 30
"""That must follow each jump."""


@pytest.mark.parametrize("jumps", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_an_hour_there_and_back_changes_nothing(
    jumps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "clock"
    move(clock, 0)
    monkeypatch.setenv("CHAOS_CLOCK", str(clock))
    monkeypatch.setenv("PYTHONPATH", str(CLOCK), prepend=os.pathsep)
    draw = random.Random(jumps)
    versions, began_s = Versions(), time.monotonic()
    with Fleet(tmp_path, SHAPE) as fleet, View(fleet.redis_url) as view:
        fleet.start_all()
        await_updates(fleet, view, versions)
        before = view.snapshot()
        for _ in range(jumps):
            move(clock, draw.choice([-HOUR_S, 0, HOUR_S]))
            await_updates(fleet, view, versions)
        move(clock, HOUR_S)
        await_updates(fleet, view, versions)
        assert view.snapshot().epoch == before.epoch
        assert view.sessions() == SHAPE.actors
        audit = fleet.finish()
    assert audit.code == 0, audit.text
    checkpoint = last_on_disk(tmp_path)
    check_trained_once(tmp_path, checkpoint)
    shown = [json.loads(line)["time"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(shown) - min(shown) > HOUR_S / 2, "the clocks did not jump"
    seconds = json.loads((tmp_path / "learner.json").read_text())["training_seconds"]
    assert 0 < seconds < time.monotonic() - began_s


def move(clock: Path, seconds: int) -> None:
    temporary = clock.with_suffix(".new")
    temporary.write_text(str(seconds))
    temporary.replace(clock)


def await_updates(fleet: Fleet, view: View, versions: Versions) -> None:
    wanted = view.snapshot().update + UPDATES

    def is_there() -> bool:
        now = view.snapshot()
        versions.see(now)
        return now.update >= wanted

    fleet.wait(is_there, f"update {wanted}")
