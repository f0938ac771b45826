"""What the learner does about an actor that the probe has found to act with another adapter."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.config import settings as configuration
from penstock.config.settings import Settings
from penstock.workloads.language.policy import LanguagePolicy
from tests.support.language.language_learner import PATIENCE_S, UNROLL, Fault
from tests.support.run.actor_run import ActorThread
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.run.learner_run import LearnerThread, account, audited

TRUE: Final = "penstock.workloads.rlhf.sentiment:true_rewards"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Between an actor's session and its policy."""
    made = Fault()
    monkeypatch.setattr(LanguagePolicy, "load", lambda policy, blob: made(policy, blob))
    return made


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
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE}
    journal = tmp_path / "run" / "journals"
    with LearnerThread(redis_url, tmp_path / "run", learned) as learner:
        bad = ActorThread(broker.address, "actor-bad", places=places, ack_journal=journal)
        eventually(lambda: fault.has_victim, "its first adapter", within_s=PATIENCE_S)
        good = ActorThread(broker.address, "actor-good", places=places, ack_journal=journal)
        with bad, good:
            fault.way = "never"
            eventually(lambda: told("session quarantined"), "the alarm", within_s=PATIENCE_S)
            fault.way = "applied"
            eventually(lambda: told("quarantine lifted"), "the end of it", within_s=PATIENCE_S)
        learner.drain()
    assert {record.actor for record in told("session quarantined")} == {"actor-bad"}
    dropped = account(tmp_path / "run")["ledger"]["dropped"]
    assert dropped["quarantined"] > 0
    assert audited(tmp_path / "run", redis_url)["trained"] > 0
