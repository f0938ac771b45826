"""An adapter that never arrives, arrives late or arrives broken.

The probe finds it in the actor's first answer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from penstock.learner.probe import Quarantine
from penstock.policy import weights
from penstock.protocol.messages import Publication
from penstock.workloads.language.policy import LanguagePolicy
from tests.support.language.adapter_fault import WRONG, Fault
from tests.support.language.scripted_language_learner import PATIENCE_S, ScriptedLanguageLearner
from tests.support.run.actor_run import ActorThread, actors
from tests.support.run.broker_process import BrokerProcess, eventually

TRUE: Final = "penstock.workloads.rlhf.sentiment:true_rewards"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Between an actor's session and its policy."""
    made = Fault()
    monkeypatch.setattr(LanguagePolicy, "load", lambda policy, blob: made(policy, blob))
    return made


class Judged:
    """A learner whose learner's side judges answers as a learner does."""

    def __init__(self, learner: ScriptedLanguageLearner) -> None:
        self.learner = learner
        tolerance = learner.settings.learner.probe_tolerance
        self._quarantine = Quarantine(learner.probe, learner.build(0), tolerance)
        self._answered: dict[int, int] = {}
        """Newest version that a session has answered for."""

    def publish(self) -> Publication:
        """Another adapter."""
        self.learner.read()
        made = self.learner.publish()
        snapshot = weights.snapshot(self.learner.policies[made.version])
        self._quarantine.expect(made.version, made.sha256, snapshot)
        return made

    def verdict(self, version: int) -> bool:
        """Whether who answers for this version is quarantined by its first answer."""
        eventually(lambda: self._look(version), "an answer", within_s=PATIENCE_S)
        (session,) = self._answered
        return self._quarantine.holds(session)

    def _look(self, version: int) -> bool:
        self.learner.read()
        probes = self.learner.log.renew().probes
        self._quarantine.check(probes)
        self._answered |= {answer.session: answer.version for answer in probes}
        return version in self._answered.values()


@pytest.mark.parametrize("way", [WRONG[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WRONG[1:])])
def test_a_wrong_adapter_is_caught_by_the_first_answer(
    way: str,
    fault: Fault,
    broker: BrokerProcess,
    begin: Callable[..., ScriptedLanguageLearner],
    base: Path,
    prompts: Path,
) -> None:
    judged = Judged(begin())
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE}
    with actors(ActorThread(broker.address, "actor-0", places=places)):
        assert not judged.verdict(judged.publish().version)
        fault.way = way
        assert judged.verdict(judged.publish().version)
        fault.way = "applied"
        assert not judged.verdict(judged.publish().version)
