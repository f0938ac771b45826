"""A learner that is frozen past its lease and wakes behind its successor: it writes nothing and ends.

Two learners with folders of their own and one folder of checkpoints, as two machines with a shared disk. One
freezes itself at a fail point; the other waits until the lease (2 s) is over, takes it, publishes, commits,
and freezes itself in turn. Then actors and broker are frozen too, and the first learner is woken: no other
can write, so all that is in Redis must stay as it is.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.fleet.fleet import Fleet, Member, Shape
from tests.support.fleet.learner_books import RunSnapshot, Versions, View, check_trained_once, last_on_disk

SHAPE: Final = Shape(
    actors=2,
    brokers=1,
    settings=("learner.lease_ttl_s=2", "learner.checkpoint_interval_s=0", "broker.session_timeout_s=120"),
)
PLACES: Final = {
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
FIRST: Final = "learner"
SECOND: Final = "learner-b"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_learner_that_wakes_behind_its_successor_writes_nothing(times: int, tmp_path: Path) -> None:
    draw = random.Random(times)
    versions = Versions()
    names = [name for _ in range(times) for name in (FIRST, SECOND)][: times + 1]
    with Fleet(tmp_path, SHAPE) as fleet, View(fleet.redis_url) as view:
        add_second(fleet)
        others = [name for name in fleet.members if name.startswith(("actor", "broker"))]
        for name in ("redis", *others):
            fleet.start(name)
        fleet.wait(lambda: fleet.serves("redis"), "Redis")
        freeze_at(fleet, names[0], rule_of(0, draw), versions, view)
        for turn in range(1, times + 1):
            before = view.snapshot()
            is_last = turn == times
            if is_last:
                take_over(fleet, names[turn], before, versions, view)
                others.append(names[turn])
            else:
                freeze_at(fleet, names[turn], rule_of(turn, draw), versions, view)
            check_taken_over(before, view.snapshot())
            wake_alone(fleet, names[turn - 1], others, view)
        fleet.drain([name for name in others if name.startswith("actor")])
        fleet.drain([names[-1]])
        audit = fleet.audit()
    check_trained_once(tmp_path, last_on_disk(tmp_path), own_folder(fleet, names[-1]) / "learner.json")
    assert audit.code == 0, audit.text


def rule_of(turn: int, draw: random.Random) -> str:
    """The places in order, then any."""
    place = list(PLACES)[turn] if turn < len(PLACES) else draw.choice(list(PLACES))
    return f"{place}=stop@{draw.randint(2, PLACES[place])}"


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


def check_taken_over(before: RunSnapshot, now: RunSnapshot) -> None:
    assert now.epoch == before.epoch + 1


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
