"""An adapter that never arrives, arrives late or arrives broken: the probe finds it in the actor's first answer."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from torch import nn

from actor.rollout import local_policy
from learner.probe import Quarantine
from penstock.config import settings as configuration
from penstock.config.settings import Settings
from penstock.policy import weights
from penstock.wire.messages import Publication
from tests.support.language.course import PATIENCE_S, UNROLL, LanguageCourse
from tests.support.run.actor_run import ActorThread, actors
from tests.support.run.broker_process import BrokerProcess, eventually
from tests.support.run.learner_run import LearnerThread, account, audited

TRUE: Final = "workloads.rlhf.sentiment:true_rewards"
WRONG: Final = ("never", "late", "corrupted")


class Fault:
    """What becomes of weights between their digest and the policy, in the actor that was first to apply any.

    way: applied, or one of `WRONG`. The actor goes on to say that it has the version it was sent.
    """

    def __init__(self) -> None:
        self.way = "applied"
        self._victim: nn.Module | None = None
        self._before = b""

    def __call__(self, module: nn.Module, blob: bytes) -> None:
        """In place of `load_into`."""
        self._victim = self._victim or module
        way = self.way if module is self._victim else "applied"
        if way != "never":
            weights.load_into(module, {"late": self._before, "corrupted": _broken(blob)}.get(way, blob))
        if module is self._victim:
            self._before = blob

    @property
    def has_victim(self) -> bool:
        """Whether an actor has applied anything."""
        return self._victim is not None


def _broken(blob: bytes) -> bytes:
    """One of the tensors is zero, as if its pages had not been written."""
    arrays = weights.decode(blob)
    name = next(name for name in sorted(arrays) if "lora_B" in name)
    return weights.encode({**arrays, name: np.zeros_like(arrays[name])})


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Between an actor's session and its policy."""
    made = Fault()
    monkeypatch.setattr(local_policy, "load_into", made)
    return made


class Judged:
    """A course whose learner's side judges answers as a learner does."""

    def __init__(self, course: LanguageCourse) -> None:
        self.course = course
        tolerance = course.settings.learner.probe_tolerance
        self._quarantine = Quarantine(course.probe, course.build(0), tolerance)
        self._answered: dict[int, int] = {}
        """Newest version that a session has answered for."""

    def publish(self) -> Publication:
        """Another adapter."""
        self.course.read()
        made = self.course.publish()
        snapshot = weights.snapshot(self.course.policies[made.version])
        self._quarantine.expect(made.version, made.sha256, snapshot)
        return made

    def verdict(self, version: int) -> bool:
        """Whether who answers for this version is quarantined by its first answer."""
        eventually(lambda: self._look(version), "an answer", within_s=PATIENCE_S)
        (session,) = self._answered
        return self._quarantine.holds(session)

    def _look(self, version: int) -> bool:
        self.course.read()
        probes = self.course.log.renew().probes
        self._quarantine.check(probes)
        self._answered |= {answer.session: answer.version for answer in probes}
        return version in self._answered.values()


@pytest.mark.parametrize("way", WRONG)
def test_a_wrong_adapter_is_caught_by_the_first_answer(
    way: str,
    fault: Fault,
    broker: BrokerProcess,
    begin: Callable[..., LanguageCourse],
    base: Path,
    prompts: Path,
) -> None:
    """It names the version and the digest that were published, and is held; the next whole adapter sets it free."""
    judged = Judged(begin())
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE}
    with actors(ActorThread(broker.address, "actor-0", places=places)):
        assert not judged.verdict(judged.publish().version)
        fault.way = way
        assert judged.verdict(judged.publish().version)
        fault.way = "applied"
        assert not judged.verdict(judged.publish().version)


@pytest.fixture
def learned(base: Path, prompts: Path) -> Settings:
    """A run of the real learner with two actors."""
    kwargs = {"model": str(base), "prompts": str(prompts), "reward": TRUE, "response_tokens": 8}
    return configuration.load(
        [
            {
                "run": "words",
                "workload": "rlhf",
                "environment": {"id": "words", "count": 8, "kwargs": kwargs},
                "policy": {"kwargs": {"model": str(base), "rank": 4}},
                "actor": {"count": 2, "unroll_length": UNROLL},
                "algorithm": {"name": "token_ppo", "batch_steps": 8 * UNROLL, "learning_rate": 2e-3},
                "learner": {"total_steps": 10_000_000},
                "evaluation": {"episodes": 2, "timeout_s": 1},
            }
        ]
    )


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], list[Any]]]:
    """Log records that begin with a text."""
    with caplog.at_level(logging.WARNING):
        yield lambda text: [one for one in caplog.records if one.getMessage().startswith(text)]


def test_the_learner_leaves_out_whose_adapter_never_arrives_and_goes_on_with_the_others(
    fault: Fault,
    learned: Settings,
    redis_url: str,
    broker: BrokerProcess,
    base: Path,
    prompts: Path,
    tmp_path: Path,
    told: Callable[[str], list[Any]],
) -> None:
    """An alarm, its data booked `quarantined`, the other actor's learned from; once adapters arrive it is free again."""
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE}
    journal = tmp_path / "run" / "journals"
    with LearnerThread(redis_url, tmp_path / "run", learned) as learner:
        bad = ActorThread(broker.address, "actor-bad", places=places, ack_journal=journal)
        eventually(lambda: fault.has_victim, "its first adapter", within_s=PATIENCE_S)
        good = ActorThread(broker.address, "actor-good", places=places, ack_journal=journal)
        with actors(bad, good):
            fault.way = "never"
            eventually(lambda: told("session quarantined"), "the alarm", within_s=PATIENCE_S)
            fault.way = "applied"
            eventually(lambda: told("quarantine lifted"), "the end of it", within_s=PATIENCE_S)
        learner.drain()
    assert {record.actor for record in told("session quarantined")} == {"actor-bad"}
    dropped = account(tmp_path / "run")["ledger"]["dropped"]
    assert dropped["quarantined"] > 0
    assert audited(tmp_path / "run", redis_url)["trained"] > 0
