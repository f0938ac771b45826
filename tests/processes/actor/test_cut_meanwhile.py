"""What a rollout worker has collected may be cut by another thread while its environments are stepped."""

import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session, open_session
from penstock.actor.rollout.generator import EnvironmentGenerator, make_generator
from penstock.config.settings import load
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Role
from penstock.rpc.auth import Credentials
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle
from tests.support.run.actor_run import PATIENCE_S, Plan, ScriptedLearner
from tests.support.run.broker_process import BrokerProcess

FRAGMENTS = 300
LONG_S = 0.5
"""Many times what a cut takes."""


@pytest.fixture
def session(redis_url: str, broker: BrokerProcess) -> Iterator[Session]:
    learner = ScriptedLearner(redis_url, Plan(unroll=64))
    learner.publish()
    client = BrokerClient(broker.address, Credentials())
    session = open_session(client, "a", Role.ROLLOUT, Lifecycle("actor"))
    assert session is not None
    session.start()
    assert session.wait_until(lambda: session.weights is not None, PATIENCE_S)
    yield session
    session.close(politely=True)
    learner.log.close()


@pytest.fixture
def generator(session: Session) -> Iterator[EnvironmentGenerator]:
    generator = make_generator(session.specification, load([]), Health("actor"))
    generator.begin("a", session)
    generator.follow(session)
    yield generator
    generator.close()


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.promise("actor-makes-environments-session")
def test_each_step_is_in_one_fragment_while_another_thread_cuts(
    generator: EnvironmentGenerator, hasty_threads: None
) -> None:
    fragments: list[Fragment] = []
    over = threading.Event()

    def step() -> None:
        while not over.is_set():
            generator.unroll(over.is_set)

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    while len(fragments) < FRAGMENTS and stepping.is_alive():
        if generator.collected:
            fragments.append(generator.cut(1, len(fragments) + 1, 0)[0])
    over.set()
    stepping.join()
    arrays = [fragment.arrays() for fragment in fragments]
    assert len(arrays) == FRAGMENTS
    for one, following in pairwise(arrays):
        np.testing.assert_array_equal(one["observation"][-1], following["observation"][0])
        assert all(int(step) < len(one["reward"]) for step in np.asarray(one["final/step"]))


def test_nothing_is_cut_while_a_step_is_recorded(
    generator: EnvironmentGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, cut = generator._builder.record, threading.Event()
    found: list[bool] = []

    def cut_once() -> None:
        generator.cut(1, 1, 0)
        cut.set()

    def slow_record(*step: Any) -> None:
        record(*step)
        if not found:
            threading.Thread(target=cut_once, daemon=True).start()
            found.append(cut.wait(LONG_S))

    monkeypatch.setattr(generator._builder, "record", slow_record)
    generator.unroll(lambda: True)
    assert found == [False]
    assert cut.wait(PATIENCE_S)
