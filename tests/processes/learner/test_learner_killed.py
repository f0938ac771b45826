"""A learner among other processes dies, freezes or has its clock moved: each fragment is trained once."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.learner.checkpoint.store import CheckpointStore
from penstock.registry.registry import Registry
from penstock.registry.weight_files import kept_files, read_kept, registry_url
from tests.support.fleet.fleet import ROOT, Fleet, Member, Shape
from tests.support.fleet.one_parameter_learner import (
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
def test_a_learner_killed_at_any_point_trains_each_fragment_once(times: int, tmp_path: Path) -> None:
    versions, uncommitted = Versions(), 0
    parents: dict[int, str] = {}
    with Fleet(tmp_path, SHAPE) as fleet, View(fleet.redis_url) as view:
        start_others(fleet)
        for rule in plan(times, seed=times):
            before = view.snapshot()
            parents[before.epoch + 1] = before.newest_id
            die_at(fleet, rule, versions, view)
            after = view.snapshot()
            check_after_death(tmp_path, after)
            whole = CheckpointStore(tmp_path / "checkpoints", 3).ids()[:1]
            uncommitted += whole not in ([], [after.newest_id])
        last = view.snapshot()
        parents[last.epoch + 1] = last.newest_id
        assert len(fleet.log) == times * len(PLACES)
        audit = fleet.finish()
    assert uncommitted >= times, "no death left a whole checkpoint that was not committed"
    check_parents(tmp_path / "lineage.jsonl", parents)
    check_trained_once(tmp_path, last_on_disk(tmp_path))
    assert audit.code == 0, audit.text


def start_others(fleet: Fleet) -> None:
    for name in fleet.members:
        if not name.startswith("learner"):
            fleet.start(name)
    fleet.wait(lambda: fleet.serves("redis"), "Redis")


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


KEEPING: Final = Shape(actors=2, brokers=1, settings=("learner.keep_every_updates=2",))
RULES: Final = ("keep.writing=kill@2", "keep.registering=kill@2")


def rows(run_dir: Path) -> set[int]:
    """Versions that are registered; the file of each that is kept is whole."""
    with Registry.open(registry_url(run_dir)) as registry:
        for one in registry.pinned("default"):
            assert len(read_kept(run_dir, one.version, one.sha256)) == one.size_bytes
        return {one.version for one in registry.list("default")}


@pytest.mark.promise("learner-dies-file-version")
@pytest.mark.timeout(600)
def test_a_learner_that_dies_between_file_and_row_registers_nothing_partly(tmp_path: Path) -> None:
    versions, registered, deaths = Versions(), set[int](), 0
    with Fleet(tmp_path, KEEPING) as fleet, View(fleet.redis_url) as view:
        start_others(fleet)
        for rule in RULES:
            die_at(fleet, rule, versions, view)
            found = rows(tmp_path)
            assert registered <= found
            registered = found
            deaths += rule.startswith("keep.registering")
            assert len(kept_files(tmp_path) - found) <= deaths
        fleet.start("learner")
        fleet.wait(lambda: max(rows(tmp_path)) > max(registered), "the next version that is kept")
        audit = fleet.finish()
    assert kept_files(tmp_path) - rows(tmp_path), "no death left a file without a row"
    assert audit.code == 0, audit.text


# Two learners with folders of their own and one folder of checkpoints, as on two machines with a shared disk.
# One freezes itself; the other takes the lease when it is over, publishes, commits, and freezes in turn. Then
# actors and broker are frozen and the first one is woken: no other can write, so Redis must stay as it is.
TWO_LEARNERS: Final = Shape(
    actors=2,
    brokers=1,
    settings=("learner.lease_ttl_s=2", "learner.checkpoint_interval_s=0", "broker.session_timeout_s=120"),
)
FIRST, SECOND = "learner", "learner-b"
FREEZING: Final = {
    "commit.before": 60,
    "publish.stored": 30,
    "write.before": 60,
    "update.after": 60,
    "publish.before": 30,
    "publish.allocated": 30,
    "rename.before": 60,
    "commit.trimming": 60,
    "lease.renewing": 3,
    "feed.choosing": 60,
}
"""Where a learner freezes, and at which hit at most; the first ones before all others."""


@pytest.mark.promise("learner-slept-through-lease")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_learner_that_wakes_after_its_successor_started_writes_nothing(times: int, tmp_path: Path) -> None:
    draw = random.Random(times)
    versions = Versions()
    names = [name for _ in range(times) for name in (FIRST, SECOND)][: times + 1]
    with Fleet(tmp_path, TWO_LEARNERS) as fleet, View(fleet.redis_url) as view:
        add_second(fleet)
        others = [name for name in fleet.members if name.startswith(("actor", "broker"))]
        start_others(fleet)
        freeze_at(fleet, names[0], rule_of(0, draw), versions, view)
        for turn in range(1, times + 1):
            before = view.snapshot()
            is_last = turn == times
            if is_last:
                take_over(fleet, names[turn], before, versions, view)
                others.append(names[turn])
            else:
                freeze_at(fleet, names[turn], rule_of(turn, draw), versions, view)
            assert view.snapshot().epoch == before.epoch + 1, "the lease changed hands once"
            wake_alone(fleet, names[turn - 1], others, view)
        fleet.drain([name for name in others if name.startswith("actor")])
        fleet.drain([names[-1]])
        audit = fleet.audit()
    check_trained_once(tmp_path, last_on_disk(tmp_path), own_folder(fleet, names[-1]) / "learner.json")
    assert audit.code == 0, audit.text


def rule_of(turn: int, draw: random.Random) -> str:
    """The places in order, then any."""
    place = list(FREEZING)[turn] if turn < len(FREEZING) else draw.choice(list(FREEZING))
    return f"{place}=stop@{draw.randint(2, FREEZING[place])}"


def own_folder(fleet: Fleet, name: str) -> Path:
    return fleet.folder if name == FIRST else fleet.folder / "b"


def add_second(fleet: Fleet) -> None:
    """A learner that is another holder of the lease, and resumes from the first one's checkpoints."""
    own = own_folder(fleet, SECOND)
    own.mkdir()
    (fleet.folder / "checkpoints").mkdir()
    for name in ("checkpoints", "lineage.jsonl"):
        (own / name).symlink_to(fleet.folder / name)
    spec = fleet.members[FIRST].spec
    command = [str(own) if word == str(fleet.folder) else word for word in spec.command]
    second = replace(spec, name=SECOND, command=(*command, "--resume"), on_restart=())
    fleet.members[SECOND] = Member(second, fleet.folder / "phases" / SECOND)


def freeze_at(fleet: Fleet, name: str, rule: str, versions: Versions, view: View) -> None:
    """Start a learner and wait until it has frozen itself; it took the lease before that."""
    fleet.start(name, failpoints=rule)

    def is_frozen() -> bool:
        versions.see(view.snapshot())
        return state_of(fleet.pid(name)) == "T"

    fleet.wait(is_frozen, f"{name} to freeze at {rule}")
    assert rule.partition("=")[0] in {phase.name for phase in fleet.members[name].phases()}


def take_over(fleet: Fleet, name: str, before: RunSnapshot, versions: Versions, view: View) -> None:
    fleet.start(name)

    def has_committed() -> bool:
        now = view.snapshot()
        versions.see(now)
        return now.epoch > before.epoch and now.version > before.version and now.committed > before.committed

    fleet.wait(has_committed, f"{name} to take over")


def wake_alone(fleet: Fleet, name: str, others: list[str], view: View) -> None:
    for other in others:
        fleet.freeze(other)
    before = when_still(fleet, view)
    member = fleet.members[name]
    fleet.thaw(name)
    fleet.wait(lambda: member.exit is not None, f"{name} to end")
    assert member.exit is not None
    assert member.exit.code == 1, fleet.last_line(name)
    assert "may not write any longer" in fleet.last_line(name)
    after = view.everything()
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    assert not changed, f"{name} wrote behind its successor: {changed}"
    assert not (own_folder(fleet, name) / "learner.json").exists()
    fleet.note_death(name, "taken over")
    for other in others:
        fleet.thaw(other)


def when_still(fleet: Fleet, view: View) -> dict[bytes, Any]:
    """The data set once what frozen processes had sent already has arrived."""
    seen: list[dict[bytes, Any]] = []

    def is_still() -> bool:
        seen.append(view.everything())
        return len(seen) >= 3 and seen[-1] == seen[-2] == seen[-3]

    fleet.wait(is_still, "the data set to stand still")
    return seen[-1]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Leases and sessions are judged by Redis's clock, waits by monotonic ones; the wall clock may only be shown.
# A `sitecustomize` on the processes' path moves theirs; Redis keeps the kernel's time.
HOUR_S: Final = 3600
CLOCK: Final = ROOT / "tests" / "support" / "fleet" / "clock"
CLOCKED: Final = Shape(
    actors=2,
    brokers=1,
    settings=(
        "learner.lease_ttl_s=5",
        "broker.session_timeout_s=20",
        "algorithm.stale_after=8",
        "learner.checkpoint_interval_s=0.2",
    ),
)
BETWEEN_JUMPS: Final = 30
"""That must follow each jump."""


@pytest.mark.parametrize("jumps", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_a_clock_moved_by_an_hour_and_back_changes_nothing(
    jumps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "clock"
    move(clock, 0)
    monkeypatch.setenv("CHAOS_CLOCK", str(clock))
    monkeypatch.setenv("PYTHONPATH", str(CLOCK), prepend=os.pathsep)
    draw = random.Random(jumps)
    versions, began_s = Versions(), time.monotonic()
    with Fleet(tmp_path, CLOCKED) as fleet, View(fleet.redis_url) as view:
        fleet.start_all()
        await_updates(fleet, view, versions)
        before = view.snapshot()
        for _ in range(jumps):
            move(clock, draw.choice([-HOUR_S, 0, HOUR_S]))
            await_updates(fleet, view, versions)
        move(clock, HOUR_S)
        await_updates(fleet, view, versions)
        assert view.snapshot().epoch == before.epoch
        assert view.sessions() == CLOCKED.actors
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
    wanted = view.snapshot().update + BETWEEN_JUMPS

    def is_there() -> bool:
        now = view.snapshot()
        versions.see(now)
        return now.update >= wanted

    fleet.wait(is_there, f"update {wanted}")
