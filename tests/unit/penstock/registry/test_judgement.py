"""Several servers and restarts make one trial of a canary, in the registry."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.sections import CanarySection
from penstock.registry import traffic
from penstock.registry.canary import ClientReturn, Seen, Trial, TrialState, Verdict, Window
from penstock.registry.records import NewVersion, NotAllowed, Origin, Status
from penstock.registry.registry import Registry
from tests.support.storage.ready_tables import with_registry

BOUNDS = CanarySection()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A registry in which version 2 is the canary of half of the clients, and version 1 active."""
    found = f"sqlite:///{tmp_path}/registry.sqlite"
    with Registry.open(with_registry(found), migrate=True) as registry:
        for version in (1, 2, 3):
            registry.register(
                NewVersion(
                    policy="default",
                    version=version,
                    run="r",
                    update=version,
                    sha256=f"{version:064x}",
                    size_bytes=1,
                    origin=Origin.PERIODIC,
                ),
                by="test",
            )
        registry.promote("default", 1, "first", by="test")
        registry.promote("default", 2, "try", by="test", to=Status.CANARY, canary_share=0.5)
    return found


@pytest.fixture
def servers(url: str) -> Iterator[tuple[Registry, Registry]]:
    """Two of them."""
    with Registry.open(url) as first, Registry.open(url) as second:
        yield first, second


def trial_of(registry: Registry) -> Trial:
    """The one that is on."""
    trial = Trial.of(registry.arms("default"))
    assert trial is not None
    return trial


def client(number: int, *, level: int = 0, drop: float = 0.0) -> ClientReturn:
    """One of many; those of the canary earn less by `drop`."""
    canary = number % 2 == 0
    value = number % 3 - drop * canary
    return ClientReturn(client=f"{number:016x}", level=level, canary=canary, part=0.5, value=value)


def judge(registry: Registry, *seen: Seen) -> TrialState:
    """The state after what one server has seen."""
    state = registry.judge("default", trial_of(registry), BOUNDS, seen)
    assert state is not None
    return state


@pytest.mark.promise("several-servers-restarts-make")
def test_two_servers_make_one_judgement(servers: tuple[Registry, Registry]) -> None:
    for number in range(60):
        state = judge(servers[number % 2], client(number, drop=5.0))
        if state.verdict is Verdict.WITHDRAW:
            break
    assert 12 < number < 60
    assert judge(servers[0]) == judge(servers[1]) == state


@pytest.mark.promise("several-servers-restarts-make")
def test_a_client_counts_once_on_all_servers_and_after_restarts(
    url: str, servers: tuple[Registry, Registry]
) -> None:
    once = judge(servers[0], *map(client, range(20)))
    assert judge(servers[1], *map(client, range(20)), client(3), client(3)) == once
    with Registry.open(url) as restarted:
        assert judge(restarted, *map(client, range(20))) == once
        later = judge(restarted, client(3, level=1))
    assert later.levels[0] == once.levels[0]
    assert (later.levels[1].active, later.levels[1].canary) == (1, 0)


def test_a_client_without_a_key_is_another_one_each_time(servers: tuple[Registry, Registry]) -> None:
    nameless = [replace(client(number), client="") for number in range(10)]
    judge(servers[0], *nameless)
    assert judge(servers[1], *nameless).levels[0].active == 10


def test_servers_that_judge_at_once_lose_nothing(url: str) -> None:
    def serve(first: int) -> None:
        with Registry.open(url) as registry:
            for number in range(first, 40, 4):
                judge(registry, Window(answers=number + 1))

    threads = [threading.Thread(target=serve, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Registry.open(url) as registry:
        state = judge(registry)
    assert (state.answers, state.latency.count, state.errors.count) == (sum(range(1, 41)), 0, 40)


def test_another_trial_begins_anew(servers: tuple[Registry, Registry]) -> None:
    registry = servers[0]
    old = trial_of(registry)
    judge(registry, *map(client, range(10)))
    registry.set_traffic(replace(registry.traffic("default"), experiment="second"), "again", by="test")
    assert registry.judge("default", old, BOUNDS, [client(11)]) is None
    assert judge(registry).levels[0].active == 0
    assert judge(registry, client(1)).levels[0].active == 1
    registry.rollback("default", "enough", by="test")
    assert Trial.of(registry.arms("default")) is None
    registry.promote("default", 3, "next", by="test", to=Status.CANARY, canary_share=0.5)
    assert judge(registry) == TrialState()


def test_a_share_that_grows_goes_on_with_the_trial(servers: tuple[Registry, Registry]) -> None:
    registry = servers[0]
    before = judge(registry, *map(client, range(10)))
    registry.set_traffic(replace(registry.traffic("default"), canary_share=0.6), "more", by="test")
    assert judge(registry) == before


def test_clients_beyond_the_bound_are_not_compared(
    servers: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "MAX_CLIENTS", 5)
    state = judge(servers[0], *map(client, range(20)))
    assert (state.levels[0].canary + state.levels[0].active, state.is_full) == (5, True)
    state = judge(servers[1], *map(client, range(20, 40)), Window(answers=3, failed=3, not_finite=1))
    assert state.levels[0].canary + state.levels[0].active == 5
    assert state.verdict is Verdict.WITHDRAW


def test_a_state_of_another_program_begins_anew(
    servers: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(servers[0], *map(client, range(10)))
    monkeypatch.setattr("penstock.registry.canary.from_json", _unreadable)
    assert judge(servers[1], client(50)).levels[0].canary == 1


def _unreadable(_text: str) -> TrialState:
    raise ValueError("of another program")


@pytest.mark.promise("canary-worse-withdrawn-share")
@pytest.mark.parametrize(("latest", "most"), [(0.0, 0.8), (0.5, 0.4)])
def test_a_share_that_leaves_no_client_to_compare_with_is_refused(
    servers: tuple[Registry, Registry], latest: float, most: float
) -> None:
    registry = servers[0]
    asked = replace(registry.traffic("default"), canary_share=most, latest_share=latest)
    allowed = registry.set_traffic(asked, "as much as may be", by="test")
    assert trial_of(registry).part_of(allowed.canary_share) == pytest.approx(0.8)
    with pytest.raises(NotAllowed, match=f"at most {most:g} beside latest_share={latest}"):
        registry.set_traffic(replace(allowed, canary_share=most + 0.05), "more", by="test")
    registry.rollback("default", "enough", by="test")
    with pytest.raises(NotAllowed, match="too few clients of the active version"):
        registry.promote("default", 3, "all", by="test", to=Status.CANARY, canary_share=most + 0.05)
