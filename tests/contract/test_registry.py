import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import text

from penstock.registry.records import (
    MAX_PINNED,
    Action,
    Busy,
    Conflict,
    DifferentBytes,
    Evaluation,
    NewVersion,
    NotAllowed,
    Origin,
    PolicyVersion,
    Status,
    TooManyPinned,
    Unavailable,
    UnknownVersion,
)
from penstock.registry.registry import Database, Registry
from penstock.registry.routing import Arm, follow
from penstock.registry.versions import RANGE
from tests.support.storage.postgresql_server import DATABASES, PostgresqlServer, find_programs, with_registry

ROOT = Path(__file__).resolve().parents[2]
_numbers = count()


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/registry.sqlite"
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.new_database(f"registry{next(_numbers)}")


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with Registry.open(with_registry(url), migrate=True) as opened:
        yield opened


def new(version: int, **changes: Any) -> NewVersion:
    basis = NewVersion(
        policy="default",
        version=version,
        run="cartpole-v1-abc123",
        update=version * 10,
        sha256=f"{version:064x}",
        size_bytes=1024,
        configuration="c" * 64,
        origin=Origin.PERIODIC,
    )
    return replace(basis, **changes)


def register(registry: Registry, *versions: int, **changes: Any) -> None:
    for version in versions:
        registry.register(new(version, **changes), by="learner")


def statuses(registry: Registry) -> dict[int, str]:
    """Of each version; `standby` for a retired one that is kept."""
    return {
        version.version: "standby" if version.standby else version.status.value
        for version in registry.list("default")
    }


def numbers(versions: tuple[PolicyVersion, ...]) -> list[int]:
    return [version.version for version in versions]


def test_a_registered_version_is_read_as_it_was_written(registry: Registry) -> None:
    said = new(7, parent=3, evaluation=Evaluation(mean=480.0, std=12.5, episodes=20), reason="best so far")
    stored = registry.register(said, by="learner")
    assert stored == registry.get("default", 7)
    assert said == NewVersion(**{name: getattr(stored, name) for name in NewVersion.__dataclass_fields__})
    assert (stored.status, stored.standby, stored.pinned) == (Status.CANDIDATE, False, True)
    assert "UTC" == str(stored.created.tzinfo)
    assert registry.register(new(8), by="learner").evaluation is None
    assert ("default",) == registry.policies()


def test_what_is_repeated_changes_nothing(registry: Registry) -> None:
    register(registry, 1, 2)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "second", by="ada")
    before = registry.arms("default"), registry.events("default")
    registry.promote("default", 2, "second", by="ada")
    assert Status.ACTIVE is registry.register(new(2), by="learner").status
    assert before == (registry.arms("default"), registry.events("default"))
    assert [Action.PROMOTED, Action.PROMOTED] == [event.action for event in before[1][:2]]


@pytest.mark.parametrize("change", [{"sha256": "f" * 64}, {"run": "another-run"}])
def test_a_number_always_names_the_same_version(registry: Registry, change: dict[str, Any]) -> None:
    register(registry, 7)
    with pytest.raises(DifferentBytes, match="version=7 of policy='default' is registered with sha256=0"):
        registry.register(new(7, **change), by="learner")
    register(registry, 7, policy="other", **change)


def test_runs_that_train_one_policy_have_separate_numbers(url: str, registry: Registry) -> None:
    assert registry.reserve("alpha/My_agent", "first") == 1
    registry.register(new(40), by="learner")
    assert registry.reserve("default", "b") == RANGE + 1
    together = Barrier(6)

    def ask(number: int) -> int:
        with Registry.open(url) as own:
            together.wait()
            return own.reserve("default", f"run-{number}")

    with ThreadPoolExecutor(6) as threads:
        found = sorted(threads.map(ask, range(6)))
    assert found == [RANGE * number + 1 for number in range(2, 8)]
    assert registry.reserve("default", "b") == RANGE + 1


def test_an_unknown_version_is_named(registry: Registry) -> None:
    for call in (
        lambda: registry.get("default", 9),
        lambda: registry.promote("default", 9, "x", by="ada"),
        lambda: registry.rollback("default", "x", by="ada", version=9),
        lambda: registry.retire("default", 9, "x", by="ada"),
    ):
        with pytest.raises(UnknownVersion, match="version=9 of policy='default' is not registered"):
            call()
    with pytest.raises(UnknownVersion, match="nothing to roll back"):
        registry.rollback("default", "x", by="ada")


def test_a_promotion_moves_the_arms_and_keeps_the_previous_version(registry: Registry) -> None:
    assert follow(registry.arms("default"), Arm.ACTIVE).arm is Arm.LATEST
    register(registry, 1, 2, 3)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "second", by="ada", to=Status.CANARY, canary_share=0.25)
    assert (0.25, {1: "active", 2: "canary", 3: "candidate"}) == (
        registry.traffic("default").canary_share,
        statuses(registry),
    )
    arms = registry.arms("default")
    assert (arms.active, arms.canary, arms.pinned) == (1, 2, frozenset({1, 2, 3}))
    registry.promote("default", 2, "held up", by="ada")
    assert {1: "standby", 2: "active", 3: "candidate"} == statuses(registry)
    assert 0.0 == registry.traffic("default").canary_share
    registry.promote("default", 3, "third", by="ada")
    assert {1: "retired", 2: "standby", 3: "active"} == statuses(registry)
    assert [2, 3] == numbers(registry.pinned("default"))
    active, standby = registry.active("default"), registry.standby("default")
    assert active is not None
    assert standby is not None
    assert (active.version, active.reason, standby.version) == (3, "third", 2)
    assert registry.canary("default") is None
    assert not registry.retire("default", 2, "not needed", by="ada").pinned
    assert [3] == numbers(registry.pinned("default"))


def test_a_refused_promotion_names_the_remedy(registry: Registry) -> None:
    register(registry, 1, 2, 3, 4)
    registry.retire("default", 1, "old", by="ada")
    registry.promote("default", 2, "first", by="ada")
    registry.promote("default", 3, "try", by="ada", to=Status.CANARY)
    for version, to, message in (
        (1, Status.ACTIVE, "retired and cannot become active: its weights may be gone"),
        (4, Status.CANARY, "version=3 is the canary"),
        (2, Status.CANARY, "active and cannot become canary"),
    ):
        with pytest.raises(NotAllowed, match=message):
            registry.promote("default", version, "x", by="ada", to=to)
    registry.rollback("default", "bad", by="safety", version=3)
    with pytest.raises(NotAllowed, match="rolled_back and cannot become active: promote it to canary first"):
        registry.promote("default", 3, "x", by="ada")
    with pytest.raises(ValueError, match="to='retired'"):
        registry.promote("default", 4, "x", by="ada", to=Status.RETIRED)
    with pytest.raises(ValueError, match="canary_share=0.5: only with to='canary'"):
        registry.promote("default", 4, "x", by="ada", canary_share=0.5)
    assert Status.CANARY is registry.promote("default", 3, "again", by="ada", to=Status.CANARY).status


def test_a_canary_that_is_rolled_back_leaves_the_active_version(registry: Registry) -> None:
    register(registry, 1, 2)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "try", by="ada", to=Status.CANARY, canary_share=0.1)
    wanted = replace(registry.traffic("default"), shadow=2, pins={"tester": 2, "other": 1})
    registry.set_traffic(wanted, "watch it", by="ada")
    done = registry.rollback("default", "lower return", by="safety")
    assert done.active is not None
    assert (done.withdrawn.version, done.withdrawn.reason, done.active.version) == (2, "lower return", 1)
    traffic = registry.traffic("default")
    assert (traffic.canary_share, traffic.shadow, dict(traffic.pins)) == (0.0, None, {"other": 1})
    assert {1: "active", 2: "rolled_back"} == statuses(registry)


def test_the_version_before_takes_over_when_the_active_one_is_rolled_back(registry: Registry) -> None:
    register(registry, 1, 2)
    registry.promote("default", 1, "first", by="ada")
    with pytest.raises(NotAllowed, match="keeps no version from before version=1: promote another"):
        registry.rollback("default", "bad", by="ada")
    registry.promote("default", 2, "second", by="ada")
    done = registry.rollback("default", "bad", by="ada")
    assert done.active is not None
    assert (done.withdrawn.version, done.active.version) == (2, 1)
    assert {1: "active", 2: "rolled_back"} == statuses(registry)
    with pytest.raises(NotAllowed, match="keeps no version from before"):
        registry.rollback("default", "bad", by="ada")


def test_a_second_verdict_changes_nothing(registry: Registry) -> None:
    register(registry, 1, 2, 3)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "second", by="ada")
    registry.promote("default", 3, "try", by="ada", to=Status.CANARY)
    first = registry.rollback("default", "bad", by="server-1", version=3)
    second = registry.rollback("default", "bad", by="server-2", version=3)
    assert first == second
    assert {1: "standby", 2: "active", 3: "rolled_back"} == statuses(registry)
    with pytest.raises(NotAllowed, match="version=1 of policy='default' is retired and serves no client"):
        registry.rollback("default", "bad", by="ada", version=1)


def test_a_rollback_is_recorded_as_a_new_version_with_old_content(registry: Registry) -> None:
    register(registry, 1, 2)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "second", by="ada")
    registry.rollback("default", "bad", by="ada")
    for _ in range(2):
        copy = registry.record_rollback("default", version=3, restores=1, reason="2 was bad", by="learner")
    assert (copy.parent, copy.origin, copy.status) == (1, Origin.ROLLBACK, Status.ACTIVE)
    original = registry.get("default", 1)
    assert (copy.sha256, copy.update, copy.size_bytes) == (
        original.sha256,
        original.update,
        original.size_bytes,
    )
    assert {1: "retired", 2: "rolled_back", 3: "active"} == statuses(registry)
    with pytest.raises(
        NotAllowed, match="version=1 of policy='default' is retired, its weights are not held"
    ):
        registry.record_rollback("default", version=4, restores=1, reason="x", by="learner")
    with pytest.raises(ValueError, match="parent=3: must be below version=2"):
        registry.record_rollback("default", version=2, restores=3, reason="x", by="learner")


def test_content_restored_by_a_rollback_waits_for_a_number(registry: Registry) -> None:
    for version in (1, 2, 3):
        registry.register(new(version), by="learner")
    assert registry.awaiting_number("default") is None
    for version in (1, 2):
        registry.promote("default", version, "better", by="ada")
    registry.promote("default", 3, "try", by="ada", to=Status.CANARY)
    registry.rollback("default", "worse", by="ada")
    assert registry.awaiting_number("default") is None
    registry.rollback("default", "worse", by="ada")
    awaiting = registry.awaiting_number("default")
    assert awaiting is not None
    assert awaiting.version == 1
    registry.register(new(4), by="learner")
    assert registry.awaiting_number("default") == awaiting
    registry.record_rollback("default", version=5, restores=1, reason="content of 1", by="learner")
    assert registry.awaiting_number("default") is None
    registry.promote("default", 4, "better", by="ada")
    registry.rollback("default", "worse", by="ada")
    again = registry.awaiting_number("default")
    assert again is not None
    assert again.version == 5
    registry.register(new(6), by="learner")
    registry.promote("default", 6, "an operator decided", by="ada")
    assert registry.awaiting_number("default") is None


def test_at_most_sixteen_versions_are_pinned(registry: Registry) -> None:
    register(registry, *range(1, MAX_PINNED + 1))
    with pytest.raises(TooManyPinned, match=r"keeps 16 versions, at most 16: retire one of 1, 2, 3, .*16"):
        register(registry, 17)
    registry.retire("default", 1, "old", by="ada")
    register(registry, 17)
    for version in (2, 3, 4):
        registry.promote("default", version, "next", by="ada")
        assert MAX_PINNED >= len(registry.pinned("default"))
    assert [3, *range(4, 18)] == numbers(registry.pinned("default"))


def test_unserved_versions_of_least_worth_are_retired_for_room(registry: Registry) -> None:
    register(registry, 1, 2, 3)
    register(registry, 4, origin=Origin.BEST)
    register(registry, *range(5, 17))
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "second", by="ada")
    registry.set_traffic(replace(registry.traffic("default"), shadow=5), "watch", by="ada")
    registry.promote("default", 7, "try", by="ada", to=Status.CANARY)
    registry.rollback("default", "bad", by="ada")
    for version, retired in ((17, 7), (18, 3), (19, 6), (20, 8)):
        registry.register(new(version), by="learner", make_room=True)
        assert "retired" == statuses(registry)[retired]
    assert MAX_PINNED == len(registry.pinned("default"))
    assert {1: "standby", 2: "active", 4: "candidate", 5: "candidate"}.items() <= statuses(registry).items()


def test_a_serving_version_is_not_retired(registry: Registry) -> None:
    register(registry, 1, 2, 3)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "try", by="ada", to=Status.CANARY, canary_share=0.5)
    registry.set_traffic(replace(registry.traffic("default"), pins={"tester": 3}), "look", by="ada")
    with pytest.raises(NotAllowed, match="version=1 .* is active: promote another version first"):
        registry.retire("default", 1, "x", by="ada")
    with pytest.raises(NotAllowed, match="version=3 .* is named by the traffic"):
        registry.retire("default", 3, "x", by="ada")
    for _ in range(2):
        registry.retire("default", 2, "not needed", by="ada")
    assert (0.0, "retired") == (registry.traffic("default").canary_share, statuses(registry)[2])


def test_traffic_is_changed_only_from_the_state_that_was_read(registry: Registry) -> None:
    register(registry, 1, 2)
    registry.promote("default", 1, "first", by="ada")
    registry.promote("default", 2, "try", by="ada", to=Status.CANARY)
    read = registry.traffic("default")
    wanted = replace(read, canary_share=0.1, latest_share=0.2, experiment="autumn", pins={"tester": 1})
    stored = registry.set_traffic(wanted, "begin", by="ada")
    assert (stored.revision, dict(stored.pins)) == (read.revision + 1, {"tester": 1})
    assert stored == registry.traffic("default") == registry.set_traffic(wanted, "begin", by="ada")
    with pytest.raises(Conflict, match="has revision=3, not 2: it was changed in between"):
        registry.set_traffic(replace(read, canary_share=0.5), "late", by="bob")


def test_traffic_to_an_absent_version_is_refused(registry: Registry) -> None:
    register(registry, 1)
    empty = registry.traffic("default")
    for wanted, message in (
        (replace(empty, canary_share=0.1), "has no canary: promote a version to canary first"),
        (replace(empty, shadow=9), "version=9 of policy='default' for 'shadow' is not held: choose one of 1"),
        (replace(empty, pins={"tester": 9}), "version=9 of policy='default' for 'tester' is not held"),
    ):
        with pytest.raises(NotAllowed, match=message):
            registry.set_traffic(wanted, "x", by="ada")
    assert empty == registry.traffic("default")


def test_the_audit_says_who_did_what_and_why(registry: Registry) -> None:
    register(registry, 1, 2)
    register(registry, 1, policy="other")
    registry.promote("default", 1, "held up for a week", by="operator/ada")
    registry.record_evaluation("default", 1, Evaluation(mean=1.0, std=0.0, episodes=5), by="evaluator")
    with pytest.raises(NotAllowed):
        registry.rollback("default", "x", by="bob")
    newest, promoted, *_ = events = registry.events("default")
    assert (4, Action.EVALUATED, 5) == (len(events), newest.action, newest.detail["episodes"])
    assert (promoted.version, promoted.by, promoted.reason) == (1, "operator/ada", "held up for a week")
    assert {"from": "candidate", "to": "active"} == promoted.detail
    assert events[:2] == registry.events("default", limit=2)
    with pytest.raises(ValueError, match="limit=0"):
        registry.events("default", limit=0)


@pytest.mark.parametrize(("reason", "by"), [("", "ada"), ("x", " "), ("x" * 2000, "ada")])
def test_a_change_without_reason_or_name_is_refused(registry: Registry, reason: str, by: str) -> None:
    register(registry, 1)
    with pytest.raises(ValueError, match="what the audit shall show"):
        registry.promote("default", 1, reason, by=by)
    assert {1: "candidate"} == statuses(registry)


def test_the_database_itself_admits_one_active_version(
    url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.registry.registry.RETRY_S", 0.1)
    register(registry, 1, 2)
    registry.promote("default", 1, "first", by="ada")
    database = Database(url)
    for status in ("active", "nonsense"):
        statement = text("UPDATE policy_versions SET status = :status WHERE version = 2")
        with pytest.raises(Exception, match="(?i)unique|check|conflict"):
            database.write(lambda session, s=status, t=statement: session.execute(t, {"status": s}))  # type: ignore[misc]
    database.close()
    assert {1: "active", 2: "candidate"} == statuses(registry)


RACER = """
import json, multiprocessing, os, sys
from dataclasses import replace
from penstock.registry.records import NewVersion, Origin, RegistryError
from penstock.registry.registry import Registry

def promote(registry, number):
    registry.promote("default", number, "raced", by=str(number))

def traffic(registry, number):
    wanted = replace(registry.traffic("default"), latest_share=number / 1000)
    registry.set_traffic(wanted, "raced", by=str(number))

def register(registry, number):
    new = NewVersion(policy="default", version=number, run="r", update=1, sha256="a" * 64, size_bytes=1,
                     origin=Origin.PERIODIC)
    registry.register(new, by=str(number))

def take(turn):
    with Registry.open(url, migrate=True) as registry:
        together.wait(60)
        for number in turn:
            try:
                globals()[call](registry, number)
                say(f"{number} done")
            except RegistryError as error:
                say(f"{number} {type(error).__name__}")

def say(line):
    # In one write: print may write a line in pieces, between which another process writes.
    os.write(1, f"{line}\\n".encode())

url, call, turns = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
forking = multiprocessing.get_context("fork")
together = forking.Barrier(len(turns))
processes = [forking.Process(target=take, args=(turn,)) for turn in turns]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(abs(process.exitcode) for process in processes))
"""


def race(url: str, call: str, *turns: list[int]) -> dict[int, str]:
    """How each call ended.

    All processes run at the same time; each one makes the calls of its own turn in order.
    """
    done = subprocess.run(
        [sys.executable, "-c", RACER, url, call, json.dumps(turns)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=True,
    )  # fmt: skip
    return {int(number): ending for number, ending in map(str.split, done.stdout.splitlines())}


def test_processes_that_promote_at_once_take_turns(url: str, registry: Registry) -> None:
    register(registry, *range(1, 13))
    said = race(url, "promote", [1, 3, 5, 7, 9, 11], [2, 4, 6, 8, 10, 12])
    assert dict.fromkeys(range(1, 13), "done") == dict(sorted(said.items()))
    found = statuses(registry)
    assert {"active": 1, "standby": 1, "retired": 10} == {
        status: list(found.values()).count(status) for status in set(found.values())
    }
    promoted = [event.version for event in registry.events("default") if event.action is Action.PROMOTED]
    active, standby = registry.active("default"), registry.standby("default")
    assert active is not None
    assert standby is not None
    assert promoted[:2] == [active.version, standby.version]
    assert 12 == registry.traffic("default").revision


def test_no_change_of_traffic_hides_another(url: str, registry: Registry) -> None:
    said = race(url, "traffic", list(range(1, 60)), list(range(101, 160)))
    assert {"done", "Conflict"} >= set(said.values())
    done = [number for number, ending in said.items() if ending == "done"]
    assert len(done) == registry.traffic("default").revision
    by = {int(event.by): event.detail["revision"] for event in registry.events("default", limit=200)}
    assert set(done) == set(by)
    assert len(done) == len(set(by.values()))


def test_the_bound_holds_against_processes_that_register_at_once(url: str, registry: Registry) -> None:
    said = race(url, "register", list(range(1, 20)), list(range(101, 120)))
    assert {"done", "TooManyPinned"} == set(said.values())
    assert MAX_PINNED == len(registry.pinned("default")) == list(said.values()).count("done")


def test_processes_that_open_a_new_registry_at_once_make_one(url: str) -> None:
    together = Barrier(6)

    def open_and_look() -> int:
        together.wait()
        with Registry.open(url, migrate=True) as registry:
            return len(registry.list("default"))

    with ThreadPoolExecutor(6) as threads:
        found = [threads.submit(open_and_look) for _ in range(6)]
        assert [0] * 6 == [each.result(timeout=60) for each in found]
    assert {1: "UnknownVersion", 2: "UnknownVersion"} == race(url, "promote", [1], [2])


def test_a_process_killed_in_a_transaction_leaves_nothing(url: str, registry: Registry) -> None:
    register(registry, 1)
    code = """
import sys, time
from penstock.registry import versions
from penstock.registry.registry import Database

def promote(session):
    versions.promote(session, "default", 1, "x", by="x")
    session.flush()
    print("written", flush=True)
    time.sleep(600)

Database(sys.argv[1]).write(promote)
"""
    process = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert "written\n" == process.stdout.readline()
    assert {1: "candidate"} == statuses(registry)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert Status.ACTIVE is registry.promote("default", 1, "again", by="ada").status


def test_a_database_that_others_keep_locked_is_busy_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.registry.registry.BUSY_S", 0.05)
    monkeypatch.setattr("penstock.registry.registry.RETRY_S", 0.2)
    file = tmp_path / "registry.sqlite"
    with Registry.open(f"sqlite:///{file}", migrate=True) as registry:
        register(registry, 1)
        holder = sqlite3.connect(file, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(Busy, match="database is locked.*nothing was changed; try again"):
            registry.promote("default", 1, "x", by="ada")
        assert time.monotonic() - started < 10
        assert {1: "candidate"} == statuses(registry)
        holder.close()
        registry.promote("default", 1, "x", by="ada")


def test_a_database_that_does_not_answer_is_unavailable(tmp_path: Path, short_folder: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer: unable to open"):
        Registry.open(f"sqlite:///{tmp_path}/none/registry.sqlite", migrate=True)
    with pytest.raises(Unavailable, match="does not answer") as caught:
        Registry.open(f"postgresql://ada:secret@/registry?host={short_folder}")
    assert "secret" not in str(caught.value)


@pytest.mark.postgresql
@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_a_server_that_returns_is_used_again(short_folder: Path) -> None:
    programs = find_programs()
    assert programs is not None
    server = PostgresqlServer(programs, short_folder)
    server.start()
    try:
        with Registry.open(server.new_database("registry"), migrate=True) as registry:
            register(registry, 1)
            registry.promote("default", 1, "first", by="ada")
            server.stop()
            for call in (lambda: registry.arms("default"), lambda: register(registry, 2)):
                with pytest.raises(Unavailable, match="does not answer"):
                    call()
            server.start()
            assert 1 == registry.arms("default").active
            register(registry, 2)
    finally:
        server.stop()


@pytest.mark.postgresql
@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_a_database_without_a_locale_serves(postgresql: PostgresqlServer) -> None:
    url = postgresql.new_database("ascii", "--encoding", "SQL_ASCII", "--locale", "C")
    with Registry.open(url, migrate=True) as registry:
        assert registry.policies() == ()
