"""Campaigns themselves: a seed names one, and one that hits idle processes is none."""

import re

import pytest

from penstock.runtime.failpoint import _parse
from tests.support.fleet.campaign import HITS, OF_ACTORS, OF_BROKERS, POINTS, SHORT, WAYS, Doom, Pace, draw
from tests.support.fleet.fleet import ROOT, Kill, KillLog

FOLDERS = {"actor": ("actor",), "broker": ("broker",), "learner": ("learner", "broker")}
"""Where the code of each role lies; the learner calls the broker's package."""
NAMES = ("actor-0", "actor-1", "broker-0", "learner", "redis")


def dooms(seed: int) -> list[Doom]:
    pace = Pace(freezes=0.5, ways=tuple(WAYS))
    return [draw(seed, name, life, pace) for name in NAMES for life in range(1, 51)]


def test_a_seed_determines_a_campaign() -> None:
    assert dooms(3) == dooms(3)
    assert dooms(3) != dooms(4)


@pytest.mark.parametrize(("role", "members", "seed"), [("actor", 4, OF_ACTORS), ("broker", 2, OF_BROKERS)])
def test_a_short_campaign_has_every_kind_of_death(role: str, members: int, seed: int) -> None:
    lives = range(1, SHORT // members + 1)
    dooms = [draw(seed, f"{role}-{index}", life, Pace()) for index in range(members) for life in lives]
    assert {doom.point for doom in dooms} == {*POINTS[role], ""}


def test_every_place_and_every_way_is_drawn() -> None:
    drawn = [doom for seed in range(20) for doom in dooms(seed)]
    assert {point for points in POINTS.values() for point in points} == {doom.point for doom in drawn} - {""}
    assert set(WAYS) == {doom.way for doom in drawn}
    assert max(HITS.values()) == max(doom.hit for doom in drawn)
    assert any(doom.frozen_s and doom.asleep for doom in drawn)
    for doom in drawn:
        _parse(doom.rule)


@pytest.mark.parametrize(("role", "folders"), FOLDERS.items())
def test_every_place_is_one_that_its_process_passes(role: str, folders: tuple[str, ...]) -> None:
    passed = {
        name
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'failpoint\("([a-z_.]+)"', file.read_text())
    }
    assert set(POINTS[role]) <= passed


def kill(*, idle: bool) -> Kill:
    phase = "leave.waiting" if idle else "append.sending"
    return Kill(at_s=0.0, name="actor-0", how="moment", phase=phase, sequence=1, idle=idle)


def test_a_campaign_against_idle_processes_fails() -> None:
    log = KillLog()
    for idle in (True, False):
        log.add(kill(idle=idle))
    log.check_busy()
    log.add(kill(idle=True))
    with pytest.raises(AssertionError, match=r"67% of the kills.*(?s:.*)actor \| leave.waiting \| 2"):
        log.check_busy()
