import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from penstock.registry.records import MAX_PINS, Evaluation, NewVersion, Origin, Traffic

NEW = NewVersion(
    policy="default",
    version=7,
    run="cartpole-v1-abc123",
    update=40,
    sha256="a" * 64,
    size_bytes=1024,
    origin=Origin.BEST,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "My Policy"}, "policy='My Policy' is not an id"),
        ({"run": ""}, "run=''"),
        ({"version": 0}, "version=0"),
        ({"version": 2**53 + 1}, "version="),
        ({"update": -1}, "update=-1"),
        ({"size_bytes": -1}, "size_bytes=-1"),
        ({"sha256": "A" * 64}, "64 lower-case hexadecimal"),
        ({"configuration": "abc"}, "configuration='abc'"),
        ({"parent": 7}, "parent=7: must be below version=7"),
        ({"reason": "x" * 2000}, "reason of 2000 characters"),
    ],
)
def test_a_version_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NEW, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"canary_share": 1.5}, "canary_share=1.5: must be between 0 and 1"),
        ({"latest_share": float("nan")}, "latest_share=nan"),
        ({"canary_share": 0.6, "latest_share": 0.5}, "more than 1 together"),
        ({"experiment": "not one"}, "experiment="),
        ({"pins": {str(number): 1 for number in range(MAX_PINS + 1)}}, "at most 256"),
        ({"pins": {"": 1}}, "client key"),
    ],
)
def test_traffic_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Traffic(policy="default"), **change)


@pytest.mark.parametrize("share", [number / 100 for number in range(101)])
def test_two_shares_may_be_all_there_is(share: float) -> None:
    Traffic(policy="default", canary_share=share, latest_share=1.0 - share)


@pytest.mark.parametrize("change", [{"mean": float("inf")}, {"std": -1.0}, {"episodes": 0}])
def test_an_evaluation_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="evaluation"):
        replace(Evaluation(mean=1.0, std=0.0, episodes=20), **change)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("registry", {"torch", "redis", "grpc", "gymnasium", "numpy"}),
        ("routing", {"torch", "redis", "grpc", "numpy", "sqlalchemy"}),
        ("canary", {"torch", "redis", "grpc", "numpy", "sqlalchemy"}),
    ],
)
def test_the_registry_loads_little(module: str, absent: set[str]) -> None:
    code = f"import penstock.registry.{module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set() == absent & set(done.stdout.split())
