import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.registry.records import Traffic, UnknownVersion
from penstock.registry.routing import Arm, Arms, Route, assign, exactly, follow, position, route

KEYS = [f"client-{number}" for number in range(20_000)]
TRAFFIC = Traffic(policy="default", canary_share=0.1, latest_share=0.3)
ARMS = Arms(traffic=TRAFFIC, active=5, canary=7, pinned=frozenset({3, 5, 7}))


def chi_square(keys: list[str], experiment: str, cells: int = 100) -> float:
    """Of the positions of `keys` over equal cells."""
    counts = Counter(int(position(key, experiment) * cells) for key in keys)
    expected = len(keys) / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in range(cells))


@pytest.mark.parametrize("experiment", ["default", "canary-7", "a", "b"])
def test_clients_are_spread_evenly(experiment: str) -> None:
    assert chi_square(KEYS, experiment) < 149


def test_keys_that_differ_in_little_are_spread_evenly() -> None:
    for keys in (
        [f"10.0.{number // 256}.{number % 256}" for number in range(20_000)],
        [f"{'x' * 200}{number:08d}" for number in range(20_000)],
    ):
        assert chi_square(keys, "default") < 149


def test_experiments_deal_independently() -> None:
    both = sum(position(key, "one") < 0.5 and position(key, "two") < 0.5 for key in KEYS)
    assert 0.25 == pytest.approx(both / len(KEYS), abs=0.0125)  # 4 deviations


def test_the_assignment_is_the_same_in_every_process_and_version() -> None:
    assert 0.28466622838490585 == position("client-1", "default")
    code = "from penstock.registry.routing import position; print(position('client-1', 'default'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == position("client-1", "default")


def test_shares_are_kept() -> None:
    found = Counter(assign(TRAFFIC, key) for key in KEYS)
    for arm, share in ((Arm.CANARY, 0.1), (Arm.LATEST, 0.3), (Arm.ACTIVE, 0.6)):
        assert share == pytest.approx(
            found[arm] / len(KEYS), abs=4 * (share * (1 - share) / len(KEYS)) ** 0.5
        )


def test_a_share_that_grows_moves_no_client_off_its_arm() -> None:
    steps = [replace(TRAFFIC, canary_share=share) for share in (0.0, 0.1, 0.4, 0.7)]
    for before, after in pairwise(steps):
        for key in KEYS[:2000]:
            was, is_now = assign(before, key), assign(after, key)
            assert was is is_now or (was, is_now) == (Arm.ACTIVE, Arm.CANARY)


@pytest.mark.parametrize(
    ("canary", "latest", "arm"), [(1.0, 0.0, Arm.CANARY), (0.0, 1.0, Arm.LATEST), (0.0, 0.0, Arm.ACTIVE)]
)
def test_none_and_all_are_exact(canary: float, latest: float, arm: Arm) -> None:
    traffic = Traffic(policy="default", canary_share=canary, latest_share=latest)
    assert {arm} == {assign(traffic, key) for key in KEYS}


def test_an_arm_without_a_version_is_answered_by_the_next() -> None:
    assert Route(arm=Arm.CANARY, version=7) == follow(ARMS, Arm.CANARY)
    assert Route(arm=Arm.ACTIVE, version=5) == follow(replace(ARMS, canary=None), Arm.CANARY)
    assert Route(arm=Arm.LATEST, version=None) == follow(replace(ARMS, canary=None, active=None), Arm.CANARY)
    assert Route(arm=Arm.LATEST, version=None) == follow(ARMS, Arm.LATEST)


def test_a_pinned_client_gets_its_version_while_it_is_held() -> None:
    key = next(key for key in KEYS if assign(TRAFFIC, key) is Arm.ACTIVE)
    pinned = replace(ARMS, traffic=replace(TRAFFIC, pins={key: 3}))
    assert Route(arm=Arm.PINNED, version=3) == route(pinned, key)
    assert Route(arm=Arm.ACTIVE, version=5) == route(replace(pinned, pinned=frozenset({5, 7})), key)


def test_a_request_may_name_a_version_that_is_held() -> None:
    assert Route(arm=Arm.PINNED, version=3) == exactly(ARMS, 3)
    with pytest.raises(UnknownVersion, match="version=4 of policy='default' is not held; held: 3, 5, 7"):
        exactly(ARMS, 4)


def test_the_shadow_computes_beside_every_version_but_itself() -> None:
    shadowed = replace(ARMS, traffic=replace(TRAFFIC, shadow=7))
    assert Route(arm=Arm.ACTIVE, version=5, shadow=7) == follow(shadowed, Arm.ACTIVE)
    assert Route(arm=Arm.LATEST, version=None, shadow=7) == follow(shadowed, Arm.LATEST)
    assert Route(arm=Arm.CANARY, version=7) == follow(shadowed, Arm.CANARY)
    assert follow(replace(shadowed, pinned=frozenset({5})), Arm.ACTIVE).shadow is None


@pytest.mark.parametrize("key", ["", "x" * 257])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="client key"):
        route(ARMS, key)


def test_any_text_is_a_key() -> None:
    assert 0.0 <= position("ключ \ud800 🗝", "default") < 1.0
