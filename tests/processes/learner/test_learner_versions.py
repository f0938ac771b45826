"""What a learner registers, what becomes of it in Redis and on disk, and what it does without a registry."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.broker.log import keys
from penstock.config.settings import Settings
from penstock.launch.policy.policy_versions import RegistryPolicy, rolled_back
from penstock.learner.publish import kept_versions
from penstock.learner.publish.kept_versions import MAX_WAITING, read_final
from penstock.protocol.messages import Role
from penstock.registry.records import MAX_PINNED, NewVersion, Origin, PolicyVersion, SchemaMismatch, Status
from penstock.registry.registry import Registry
from penstock.registry.versions import RANGE
from penstock.registry.weight_files import (
    kept_files,
    read_kept,
    read_specification,
    registry_url,
    write_kept,
)
from penstock.runtime import metrics
from tests.support.run.learner_run import BATCH, RUN, LearnerThread, Producer, settings, until, updated

POLICY = "default"
OTHER = NewVersion(
    policy=POLICY, version=1, run="other", update=1, sha256="0" * 64, size_bytes=1, origin=Origin.BEST
)
EVALUATED = {"timeout_s": 20, "episodes": 2, "interval_steps": 5 * BATCH}


ENDLESS = 10**6 * BATCH


def given(steps: int = 20 * BATCH, *, keep_every: int | None = None, **over: object) -> Settings:
    """A run whose versions are evaluated every five updates."""
    learner = {"total_steps": steps, "keep_every_updates": keep_every}
    return settings(evaluation=EVALUATED, learner=learner, **over)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Callable[[], Registry]]:
    opened: list[Registry] = []

    def open_it() -> Registry:
        if not opened:
            until((tmp_path / "registry.sqlite").exists, "the registry")
            opened.append(until(lambda: attempt(tmp_path), "the tables of the registry"))
        return opened[0]

    yield open_it
    for one in opened:
        one.close()


def attempt(run_dir: Path) -> Registry | None:
    try:
        return Registry.open(registry_url(run_dir))
    except SchemaMismatch:
        return None


def pinned(registry: Registry) -> dict[int, PolicyVersion]:
    return {one.version: one for one in registry.pinned(POLICY)}


def kept(url: str) -> set[int]:
    """The versions whose bytes Redis keeps and answers for."""
    with redis.Redis.from_url(url) as client:
        answered = {int(version) for version in client.hkeys(keys.PUBLICATIONS)}
        return {int(version) for version in client.smembers(keys.KEPT)} & answered


def play(producer: Producer, learner: LearnerThread, returns: Iterator[float]) -> None:
    """Experience and evaluations with these returns, until the learner ends."""
    session, judge = producer.open(), producer.open("judge", role=Role.EVALUATION)
    told: set[int] = set()

    def step() -> bool:
        wanted = producer.evaluate_version(judge)
        if wanted and wanted not in told:
            told.add(wanted)
            mean = next(returns, 0.0)
            producer.report(judge, [mean - 1, mean + 1], version=wanted, evaluation=True)
        return learner.ended

    producer.drive([session], step)


def improve(url: str, producer: Producer, session: int, *means: float) -> None:
    """A version of each of these means, better and better, whose bytes are kept."""
    judge = producer.open("judge", role=Role.EVALUATION)
    for mean in means:
        producer.drive([session], lambda: producer.evaluate_version(judge) > 0)
        version = producer.evaluate_version(judge)
        producer.report(judge, [mean, mean], version=version, evaluation=True)
        until(lambda wanted=version: wanted in kept(url), "the bytes of a best version")  # type: ignore[misc]


def run(url: str, run_dir: Path, made: Settings, returns: tuple[float, ...], *, resume: bool = False) -> None:
    with LearnerThread(url, run_dir, made, resume=resume) as learner, Producer(url) as producer:
        play(producer, learner, iter(returns))
        learner.finish()


@pytest.mark.promise("run-ended-best-version")
def test_the_best_and_the_last_are_registered_with_their_bytes(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    run(redis_url, tmp_path, given(), (10.0, 8.0, 30.0))
    versions = pinned(registry())
    bests = [one for one in versions.values() if one.origin is Origin.BEST]
    assert [one.evaluation.mean for one in bests if one.evaluation] == [10.0, 30.0]
    assert versions[read_final(tmp_path).version].origin in (Origin.FINAL, Origin.BEST)
    assert (registry().active(POLICY), registry().standby(POLICY)) == (bests[1], bests[0])
    assert {one.run for one in versions.values()} == {RUN}
    assert len({one.configuration for one in versions.values()}) == 1
    for version, row in versions.items():
        assert len(read_kept(tmp_path, version, row.sha256)) == row.size_bytes
        assert row.parent is None or row.parent < version
    assert kept_files(tmp_path) == versions.keys() == kept(redis_url)


@pytest.mark.promise("run-ended-best-version")
def test_an_operators_active_version_stays_active_at_the_end_of_a_run(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    with LearnerThread(redis_url, tmp_path, given(ENDLESS)) as learner, Producer(redis_url) as producer:
        improve(redis_url, producer, producer.open(), 1.0, 2.0, 3.0)
        first, second, third = sorted(kept(redis_url))
        registry().promote(POLICY, second, "tried by hand", by="operator/test")
        learner.drain()
    assert registry().get(POLICY, third).status is Status.CANDIDATE
    serving = registry().active(POLICY), registry().standby(POLICY)
    assert [one.version for one in serving if one] == [second, first]


def test_without_activate_first_no_version_becomes_active(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    run(redis_url, tmp_path, given(registry={"activate_first": False}, serving={"policy": "other"}), (10.0,))
    assert registry().active("other") is None
    assert registry().pinned("other")
    assert not registry().list(POLICY)


def test_versions_are_registered_at_intervals_and_replace_the_oldest(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    made = given(60 * BATCH, keep_every=2)
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        session = producer.open()
        for _ in range(10):
            updated(producer, session, 4)
            until(lambda: kept(redis_url), "a version that is kept")
        learner.drain()
    versions = pinned(registry())
    assert Origin.PERIODIC in {one.origin for one in versions.values()}
    assert 5 < len(versions) <= MAX_PINNED
    assert kept_files(tmp_path) == versions.keys() == kept(redis_url)


def test_the_initial_version_is_registered_before_learning(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    made = given(60 * BATCH, keep_every=1000)
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        producer.open()
        until(lambda: kept(redis_url), "a version that is kept")
        assert read_specification(tmp_path).run == RUN
        (first,) = registry().list(POLICY)
        assert (first.update, first.origin) == (0, Origin.PERIODIC)
        assert len(read_kept(tmp_path, first.version, first.sha256)) == first.size_bytes
        learner.drain()


def test_two_runs_in_one_registry_use_different_numbers(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    run(redis_url, tmp_path, given(), (1.0,))
    first = registry().reserve(POLICY, "other")
    registry().register(replace(OTHER, version=first), by="test")
    before = {one.version for one in registry().list(POLICY)}
    run(redis_url, tmp_path, given(30 * BATCH), (5.0,), resume=True)
    later = {one.version for one in registry().list(POLICY)} - before
    assert later
    assert not [version for version in later if version in range(first, first + RANGE)]


def test_no_registry_is_made_before_the_first_version_to_keep(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_versions, "POLL_S", 0.01)
    file = tmp_path / "registry.sqlite"
    learner, producer = LearnerThread(redis_url, tmp_path, given(ENDLESS)), Producer(redis_url)
    with learner, producer:
        producer.drive([producer.open()], lambda: producer.acked > 60)
        assert not file.exists()
        learner.drain()
    assert file.exists(), "the last version is registered"


def test_a_registry_that_somebody_made_is_followed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_versions, "POLL_S", 0.01)
    before = failures()
    learner, producer = LearnerThread(redis_url, tmp_path, given(ENDLESS)), Producer(redis_url)
    with learner, producer:
        session = producer.open()
        producer.drive([session], lambda: producer.acked > 8)
        (tmp_path / "registry.sqlite").mkdir()
        producer.drive([session], lambda: failures() > before)
        (tmp_path / "registry.sqlite").rmdir()
        learner.drain()


def test_a_version_that_an_operator_retires_is_not_kept(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    made = given(ENDLESS)
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        session = producer.open()
        improve(redis_url, producer, session, 1.0, 2.0)
        latest = producer.status().latest.version
        producer.drive([session], lambda: producer.status().latest.version > latest + 3)
        active, other = sorted(kept(redis_url))
        registry().retire(POLICY, other, "not wanted", by="test")
        until(lambda: kept(redis_url) == {active} == kept_files(tmp_path), "the version to go")
        learner.drain()


def renumbered(registry: Registry, original: int) -> PolicyVersion | None:
    """The active version, once it is no longer `original`."""
    active = registry.active(POLICY)
    return None if active is None or active.version == original else active


@pytest.mark.promise("rollback-new-version-old")
def test_a_rollback_is_a_new_version_with_old_content_and_training_continues(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    made = given(ENDLESS)
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        session = producer.open()
        improve(redis_url, producer, session, 1.0, 2.0)
        first, second = sorted(kept(redis_url))
        registry().promote(POLICY, second, "better", by="test")
        before = producer.status().latest
        registry().rollback(POLICY, "worse", by="test")
        copy = until(lambda: renumbered(registry(), first), "a number for the old content")
        original = registry().get(POLICY, first)
        assert copy.parent == first
        assert copy.version > before.version
        assert (copy.sha256, copy.update) == (original.sha256, original.update)
        assert original.status is Status.RETIRED
        until(lambda: kept(redis_url) == {second, copy.version} == kept_files(tmp_path), "its bytes")
        producer.drive([session], lambda: producer.status().latest.update > before.update + 2)
        assert producer.status().latest.version > copy.version
        learner.drain()


@pytest.mark.promise("rollback-new-version-old")
def test_a_rollback_after_the_end_uses_a_number_that_the_next_learner_skips(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    run(redis_url, tmp_path, given(), (1.0, 2.0))
    first = registry().standby(POLICY)
    assert first is not None
    place = RegistryPolicy(url=registry_url(tmp_path), policy=POLICY, folder=tmp_path)
    rolled_back(place, None, "worse", by="test")
    copy = registry().active(POLICY)
    assert copy is not None
    assert (copy.sha256, copy.origin) == (first.sha256, Origin.ROLLBACK)
    newest = max(pinned(registry()))
    run(redis_url, tmp_path, given(30 * BATCH), (5.0,), resume=True)
    later = [one for one in registry().list(POLICY) if one.version > newest]
    assert later
    assert all(one.parent is not None for one in later)
    assert copy.version in kept(redis_url)


@pytest.mark.promise("weights-registered-version-available")
def test_bytes_that_redis_lost_are_restored_from_the_files(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    run(redis_url, tmp_path, given(), (1.0,))
    versions, final = pinned(registry()).keys(), read_final(tmp_path)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with LearnerThread(redis_url, tmp_path, given(30 * BATCH), resume=True) as learner:
        with Producer(redis_url) as producer:
            producer.open()
            again = read_final(tmp_path)
            assert (again.blob, again.version) == (final.blob, final.version), "until the run ends again"
            play(producer, learner, iter(()))
        learner.finish()
    assert versions <= kept(redis_url)


def test_the_initial_version_is_registered_after_a_failure_of_the_registry(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    made = given(ENDLESS, keep_every=1)
    (tmp_path / "registry.sqlite").mkdir()
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        producer.drive([producer.open()], lambda: producer.status().latest.update > 2 * MAX_WAITING)
        (tmp_path / "registry.sqlite").rmdir()
        learner.drain()
    updates = sorted(one.update for one in pinned(registry()).values())
    assert updates[0] == 0
    assert updates[-1] > 2 * MAX_WAITING


@pytest.mark.promise("registry-fails-end-learning")
@pytest.mark.parametrize("broken", ["no folder", "not a database"])
def test_learning_continues_without_a_registry(redis_url: str, tmp_path: Path, broken: str) -> None:
    file = tmp_path / "registry.sqlite"
    if broken == "no folder":
        file.mkdir()
    else:
        file.write_bytes(b"nothing that a database would be\n" * 1000)
    before = failures()
    run(redis_url, tmp_path, given(), (1.0, 2.0))
    assert read_final(tmp_path).version > 0
    assert failures() > before


def failures() -> float:
    return float(metrics.REGISTRY_FAILURES._value.get())


def test_another_run_in_the_same_registry_is_unchanged(
    redis_url: str, tmp_path: Path, registry: Callable[[], Registry]
) -> None:
    url = registry_url(tmp_path)
    with Registry.open(url, migrate=True) as shared:
        shared.register(replace(OTHER, version=10**6), by="test")
        shared.register(replace(OTHER, version=10**6 + 1), by="test")
        shared.retire(POLICY, 10**6 + 1, "old", by="test")
    for version in (10**6, 10**6 + 1, 3):
        write_kept(tmp_path, version, b"somebody else's")
    run(redis_url, tmp_path, given(), (1.0,))
    assert not {10**6, 10**6 + 1} & kept(redis_url)
    assert {10**6, 10**6 + 1, 3} <= kept_files(tmp_path)
