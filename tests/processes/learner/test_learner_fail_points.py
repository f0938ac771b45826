"""The learner dies at each of twelve places, again and again; what it trained is trained once.

Real processes: Redis, a broker, two simulated actors and the shipped learner with one parameter. It makes a
checkpoint after every update, so each life meets every place, and no more than one batch may be redone.
"""

import json
import random
import signal
from pathlib import Path
from typing import Final

import pytest

from penstock.learner.checkpoint.store import CheckpointStore
from tests.support.fleet.fleet import Fleet, Shape
from tests.support.fleet.learner_books import (
    RunSnapshot,
    Versions,
    View,
    check_trained_once,
    last_on_disk,
    newest,
)

PLACES: Final = tuple(
    f"{what}.{snapshot}"
    for what in ("update", "write", "fsync", "rename", "commit", "publish")
    for snapshot in ("before", "after")
)
SHAPE: Final = Shape(actors=2, brokers=1, settings=("learner.checkpoint_interval_s=0",))
BATCH: Final = 4
"""Fragments of one update."""
MOST_HITS: Final = 10
"""A place is passed at most this often before the learner dies there."""


def plan(times: int, seed: int) -> list[str]:
    """Every place so many times, in an order and at hits that the seed decides."""
    draw = random.Random(seed)
    rules = [f"{place}=kill@{draw.randint(1, MOST_HITS)}" for place in PLACES for _ in range(times)]
    draw.shuffle(rules)
    return rules


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_learner_that_dies_anywhere_trains_each_fragment_once(times: int, tmp_path: Path) -> None:
    versions, uncommitted = Versions(), 0
    parents: dict[int, str] = {}
    with Fleet(tmp_path, SHAPE) as fleet, View(fleet.redis_url) as view:
        for name in fleet.members:
            if name != "learner":
                fleet.start(name)
        fleet.wait(lambda: fleet.serves("redis"), "Redis")
        for rule in plan(times, seed=times):
            before = view.snapshot()
            parents[before.epoch + 1] = before.newest_id
            die_at(fleet, rule, versions, view)
            after = view.snapshot()
            check_after_death(tmp_path, after)
            uncommitted += CheckpointStore(tmp_path / "checkpoints", 3).ids()[:1] not in (
                [],
                [after.newest_id],
            )
        last = view.snapshot()
        parents[last.epoch + 1] = last.newest_id
        assert len(fleet.log) == times * len(PLACES)
        audit = fleet.finish()
    assert uncommitted >= times, "no death left a whole checkpoint that was not committed"
    check_parents(tmp_path / "lineage.jsonl", parents)
    check_trained_once(tmp_path, last_on_disk(tmp_path))
    assert audit.code == 0, audit.text


def die_at(fleet: Fleet, rule: str, versions: Versions, view: View) -> None:
    place = rule.partition("=")[0]
    member = fleet.start("learner", failpoints=rule)

    def is_dead() -> bool:
        versions.see(view.snapshot())
        return member.exit is not None

    fleet.wait(is_dead, f"the learner to die at {rule}")
    assert member.exit is not None
    assert member.exit.code == -signal.SIGKILL, fleet.last_line("learner")
    assert place in {phase.name for phase in member.phases()}
    fleet.note_death("learner", "fail point")


def check_after_death(run_dir: Path, snapshot: RunSnapshot) -> None:
    """What counts is whole; what was settled since can be made again from the log."""
    if snapshot.commits:
        assert newest(run_dir, snapshot).state["position"] == snapshot.committed
    assert snapshot.settled - snapshot.committed <= BATCH


def check_parents(lineage: Path, parents: dict[int, str]) -> None:
    """The first checkpoint of each life follows what was committed when that life began."""
    lines = [json.loads(line) for line in lineage.read_text().splitlines()]
    firsts: dict[int, str] = {}
    for line in lines:
        firsts.setdefault(int(line["checkpoint"].partition("-")[0]), line["parent"])
    assert firsts
    assert firsts == {epoch: parents[epoch] for epoch in firsts}
