"""A canary that answers badly is withdrawn by what its clients see."""

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from torch import nn

from penstock.client import PolicyClient
from penstock.registry.records import Status
from tests.support.run.broker_process import eventually
from tests.support.run.serving_run import ServedRun, begun, follow, serving

ROWS: Final = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ServedRun:
    """A run whose version 1 was active first; tests add versions."""
    return begun(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def client(run: ServedRun) -> Iterator[PolicyClient]:
    """Of a server over it; answers are never slow, and clients are compared soon."""
    settings: dict[str, Any] = {"canary.settle_s": 0.05, "canary.slow_ms": 1e6}
    with (
        serving(run.folder.parent, run.folder, **settings) as server,
        PolicyClient(server.address, deadline_s=60.0) as connected,
    ):
        yield connected


@pytest.mark.promise("canary-worse-withdrawn-share")
@pytest.mark.parametrize("kind", ["nan", "negated"])
def test_a_bad_canary_is_withdrawn(run: ServedRun, client: PolicyClient, kind: str) -> None:
    follow(run, client, good := run.next_version())
    policy, bad = run.policies[good], run.build(good)
    if kind == "nan":
        nn.init.constant_(bad.actor_head.bias, float("nan"))
    else:
        bad.actor_head.weight.data.neg_()
    best = int(policy.act({"observation": ROWS[:1]}, deterministic=True).action["action"][0])
    canary = run.next_version(bad)
    run.promote(canary, canary_share=0.1)
    for number in itertools.count():
        assert number < 1500, "the canary is still there"
        episode = client.start_episode(f"client-{number}")
        given = episode.act(ROWS[0], deterministic=True)
        episode.end(terminated=True, reward=float(given.action == best))
        if number % 20 == 19 and run.status(canary) is Status.ROLLED_BACK:
            break
    eventually(lambda: {client.act(ROWS[0]).version for _ in range(60)} == {good}, "everybody back")
    assert run.status(good) is Status.ACTIVE
