"""A rollout worker and an evaluation actor of language models in a real run.

Broker, Redis, reward service, adapters.
"""

import json
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError, Settings
from penstock.policy.weights import encode
from penstock.protocol.messages import Role
from penstock.runtime.exit import EXIT_OK
from penstock.workloads.language.policy import LanguagePolicy
from penstock.workloads.language.reward.reward_model import RewardModel
from penstock.workloads.language.tokenizer import load_tokenizer
from tests.support.language.language_learner import (
    PATIENCE_S,
    UNROLL,
    Fault,
    ScriptedLanguageLearner,
    log_probs,
    responses,
)
from tests.support.run.actor_run import ActorThread
from tests.support.run.harness import BrokerProcess, eventually, reward_server
from tests.support.run.learner_run import LearnerThread, account, audited

TRUE: Final = "penstock.workloads.rlhf.sentiment:true_rewards"


def test_fragments_hold_the_adapters_answers_and_the_services_scores(
    broker: BrokerProcess,
    begin: Callable[..., ScriptedLanguageLearner],
    base: Path,
    reward: Path,
    prompts: Path,
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/reward.sock"
    learner = begin(reward_reads="tokens", group=2)
    places = {"model": str(base), "prompts": str(prompts), "reward": address}
    with reward_server(reward, tmp_path / "first", address) as first:
        actor = ActorThread(broker.address, "actor-0", places=places)
        with actor:
            eventually(lambda: learner.learn() >= 4, "four fragments", within_s=PATIENCE_S)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(PATIENCE_S)
            with reward_server(reward, tmp_path / "second", address):
                before = len(learner.fragments)
                eventually(lambda: learner.learn() >= before + 4, "four more", within_s=PATIENCE_S)
                assert actor.drain() == EXIT_OK
                learner.read()
    check_fragments(learner, base, reward)
    episodes = learner.episodes()
    assert {episode.terminated for episode in episodes} == {True, False}
    assert len({(episode.slot_id, episode.episode_id) for episode in episodes}) == len(episodes)


def check_fragments(learner: ScriptedLanguageLearner, base: Path, reward: Path) -> None:
    model, eos = RewardModel.load(reward), load_tokenizer(str(base)).eos_token_id
    assert len({fragment.header.oldest_version for fragment in learner.fragments}) >= 3
    whole = [fragment for fragment in learner.fragments if fragment.arrays()["valid"].any(0).all()]
    # One may have been handed over unfinished when the worker was asked to end.
    assert len(whole) >= len(learner.fragments) - 1
    for fragment in whole:
        arrays: dict[str, Any] = fragment.arrays()
        np.testing.assert_allclose(
            arrays["log_prob"].T[arrays["valid"].T], log_probs(learner, fragment), atol=1e-5
        )
        asked = responses(fragment, base)
        rewards = [value for value in model.score(asked).values if value is not None]
        np.testing.assert_allclose(arrays["reward"].sum(0), rewards, atol=1e-5)
        ends = [one.response_ids[-1] == eos for one in asked]
        np.testing.assert_array_equal(arrays["terminated"].any(0), ends)
        np.testing.assert_array_equal(arrays["truncated"].any(0), ~np.array(ends))
        assert [one.prompt_ids for one in asked[::2]] == [one.prompt_ids for one in asked[1::2]]
        said = json.loads(fragment.header.attributes)
        assert said["reward"]["sha256"] == model.by.sha256


def test_an_evaluation_measures_held_out_prompts_by_the_true_reward(
    broker: BrokerProcess, begin: Callable[..., ScriptedLanguageLearner], base: Path, prompts: Path
) -> None:
    learner = begin(true_reward=TRUE)
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE, "true_reward": TRUE}
    version = learner.publish().version
    again = learner.log.publish(
        encode(learner.policies[version]), update=1, settled=learner.position, scalars={}
    )

    def reported(count: int) -> bool:
        return learner.read() == 0 and len(learner.episodes(evaluation=True)) == count

    with ActorThread(broker.address, "evaluator", Role.EVALUATION, places=places):
        for count, asked in ((12, version), (24, again.version)):
            learner.log.request_evaluation(asked)
            eventually(partial(reported, count), "both results", within_s=PATIENCE_S)
    assert [report.deterministic for report in learner.reports] == [True, False, True, False]
    returns = [[episode.episode_return for episode in report.episodes] for report in learner.reports]
    assert returns[:2] == returns[2:]
    assert returns[0] != returns[1]
    assert all(-1 <= value <= 1 for value in returns[1])


@pytest.mark.promise("summary-compares-language-model")
def test_an_evaluation_begins_with_the_base_on_the_same_prompts_and_draws(
    broker: BrokerProcess, begin: Callable[..., ScriptedLanguageLearner], base: Path, prompts: Path
) -> None:
    learner = begin(true_reward=TRUE, evaluates_base=True, held_out=0.1)
    places = {"model": str(base), "prompts": str(prompts), "reward": TRUE, "true_reward": TRUE}
    untouched = learner.log.publish(
        encode(learner.base_policy()), update=1, settled=learner.position, scalars={}
    ).version

    def reported(count: int) -> bool:
        return learner.read() == 0 and len(learner.episodes(evaluation=True)) == count

    with ActorThread(broker.address, "evaluator", Role.EVALUATION, places=places):
        eventually(partial(reported, 6), "the base's result", within_s=PATIENCE_S)
        for count, asked in ((18, 1), (30, untouched)):
            learner.log.request_evaluation(asked)
            eventually(partial(reported, count), "both results", within_s=PATIENCE_S)
    played = {
        report.episodes[0].version: report.episodes for report in learner.reports if report.deterministic
    }
    of_base, *_ = (report.episodes for report in learner.reports)
    assert {episode.version for episode in of_base} == {0}
    assert [replace(one, version=0) for one in played[untouched]] == list(of_base)
    assert [one.episode_return for one in played[1]] != [one.episode_return for one in of_base]
    starts = [(one.slot_id, one.episode_id) for one in of_base]
    assert [(one.slot_id, one.episode_id) for one in played[1]] == starts
    assert len(set(starts)) == 6 > len({slot for slot, _ in starts})


def test_a_path_in_the_specification_is_not_used(
    broker: BrokerProcess, begin: Callable[..., ScriptedLanguageLearner], base: Path
) -> None:
    begin()
    actor = ActorThread(broker.address, "actor-0", places={"model": str(base)})
    error = actor.join()
    assert isinstance(error, ConfigurationError)
    assert "environment.kwargs.prompts: places are not taken from a run's specification" in str(error)
    assert "actor.places.prompts" in str(error)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    made = Fault()
    monkeypatch.setattr(LanguagePolicy, "load", lambda policy, blob: made(policy, blob))
    return made


@pytest.fixture
def learned(base: Path, prompts: Path) -> Settings:
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
    with caplog.at_level(logging.WARNING):
        yield lambda text: [one for one in caplog.records if one.getMessage().startswith(text)]


def test_the_learner_leaves_out_an_actor_whose_adapter_never_arrives(
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
