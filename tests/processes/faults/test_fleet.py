"""Whole runs under kill -9, at fail points and at random moments, and with too much experience.

Afterwards every process lives again, the actors drain and the learner commits; then `penstock audit` looks
for each fragment that an actor saw acknowledged, and for any number that was used twice."""

from pathlib import Path
from typing import Final

import pytest

from benchmarks.actors import measure
from benchmarks.stand import services
from penstock.protocol.limits import MIB
from tests.support.fleet.campaign import (
    IN_REWRITE,
    IN_USE,
    OF_ACTORS,
    OF_BOTH,
    OF_BROKERS,
    POWER_LOSS,
    SHORT,
    Campaign,
    Pace,
)
from tests.support.fleet.fleet import Audit, Fleet, Shape
from tests.support.fleet.flow_scenarios import Report, absent_learner, full_redis, overload

BUSY: Final = ("learner.lease_ttl_s=2", "algorithm.batch_steps=256")
"""Work for the actors at any time, and a learner that soon notices what happened to Redis."""
TWO_EACH: Final = ("--count", "2")
LARGE: Final = ("--observation-floats", "13107")
"""Five rows of two observations are 512 KiB."""
ROOM: Final = ("broker.max_log_bytes=300000000", "algorithm.batch_steps=128")

SEED: Final = 7
"""Of every long campaign, and of those against Redis: each way in which Redis dies is among its first."""


slow = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "seed"), [(SHORT, OF_ACTORS), pytest.param(50, SEED, marks=slow)])
def test_killed_actors_lose_nothing_that_was_acknowledged(tmp_path: Path, kills: int, seed: int) -> None:
    with Fleet(tmp_path, Shape(settings=BUSY, actor_options=TWO_EACH)) as fleet:
        Campaign(fleet, names(fleet, "actor"), seed=seed).run(kills)
        balance(fleet, fleet.finish(), kills)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "seed"), [(SHORT, OF_BROKERS), pytest.param(50, SEED, marks=slow)])
def test_killed_brokers_lose_and_double_nothing(tmp_path: Path, kills: int, seed: int) -> None:
    shape = Shape(brokers=2, settings=BUSY, actor_options=TWO_EACH)
    with Fleet(tmp_path, shape) as fleet:
        Campaign(fleet, names(fleet, "broker"), seed=seed).run(kills)
        audit = fleet.finish()
        balance(fleet, audit, kills)
        assert "log_lost" not in audit.report["fragments"]
        assert audit.report["counters"]["reopened"] == 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [8, pytest.param(30, marks=slow)])
def test_a_killed_redis_that_syncs_each_append_loses_nothing(tmp_path: Path, kills: int) -> None:
    shape = Shape(durability="fsync", settings=BUSY, actor_options=TWO_EACH)
    with Fleet(tmp_path, shape) as fleet:
        pace = Pace(shortest_s=0.1, longest_s=1.5, ways=("moment", IN_USE, IN_REWRITE))
        Campaign(fleet, ["redis"], seed=SEED, pace=pace).run(kills)
        audit = fleet.finish()
        balance(fleet, audit, kills)
        assert audit.report["counters"]["reopened"] >= kills // 2
        assert "log_lost" not in audit.report["fragments"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "large"), [(3, ()), pytest.param(30, LARGE, marks=slow)])
def test_fragments_lost_with_the_last_second_of_redis_are_booked(
    tmp_path: Path, kills: int, large: tuple[str, ...]
) -> None:
    shape = Shape(settings=(*BUSY, *ROOM), learner_options=large, actor_options=TWO_EACH if not large else ())
    with Fleet(tmp_path, shape) as fleet:
        ways = (POWER_LOSS, OF_BOTH) if not large else (POWER_LOSS, OF_BOTH, IN_USE, IN_REWRITE)
        pace = Pace(shortest_s=0.5, longest_s=1.5, ways=ways)
        # Actors that begin anew all the time draw sessions in the seconds that are lost.
        Campaign(fleet, ["redis", "actor-0", "actor-1"], seed=SEED, pace=pace).run(kills, of="redis")
        audit = fleet.finish()
        balance(fleet, audit, kills)
        assert audit.report["counters"]["reopened"] >= kills // 2
        assert audit.report["fragments"].get("log_lost", 0) > 0, audit.text


def names(fleet: Fleet, role: str) -> list[str]:
    return [name for name in fleet.members if name.startswith(role)]


def balance(fleet: Fleet, audit: Audit, kills: int) -> None:
    """The campaign was one, the run went on under it, and every fragment is where one record says."""
    fleet.log.check_busy()
    assert audit.code == 0, f"{audit.text}\n{fleet.log.table()}"
    assert audit.report["clean"]
    assert audit.report["fragments"]["trained"] >= 4 * kills
    assert sum(audit.report["journalled"].values()) >= 4 * kills


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_a_full_redis_still_accepts_calls_that_free_memory(tmp_path: Path, seconds: int) -> None:
    full_redis(tmp_path, seconds, Report())


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_actors_outwait_an_absent_learner(tmp_path: Path, seconds: int) -> None:
    absent_learner(tmp_path, seconds, Report())


MOST_MEMORY = 512 * MIB


@pytest.mark.parametrize(
    ("rate", "seconds"), [(0.5, 6), pytest.param(5, 60, marks=pytest.mark.slow)], ids=["low", "full"]
)
def test_two_hundred_actors_share_one_broker(rate: float, seconds: float) -> None:
    with services(durability="fsync_1s") as here:
        outcome = measure(here, actors=200, rate=rate, seconds=seconds)
    assert outcome.acked > 200, "the actors sent next to nothing"
    assert outcome.lost == 0
    assert outcome.broker_memory < MOST_MEMORY


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_twice_the_load_with_a_small_buffer_loses_nothing(tmp_path: Path, seconds: int) -> None:
    overload(tmp_path, seconds, Report())
