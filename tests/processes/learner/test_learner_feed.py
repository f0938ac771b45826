"""The learner takes the log in order, drops under a named reason, and says why it stalls."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock.learner.learner
import penstock.learner.lease
from penstock.broker.log import keys
from penstock.broker.log.script import MOST_DAMAGED
from penstock.config.settings import Settings
from penstock.launch.audit.audit_command import audit
from penstock.learner.model import make_model
from penstock.protocol.messages import Role
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.runtime.retry import Interrupted
from tests.support.run.actor_run import ActorThread
from tests.support.run.harness import BrokerProcess
from tests.support.run.learner_run import (
    BATCH,
    CHARGE,
    PATIENCE_S,
    SCHEMA,
    SLOTS,
    STEPS,
    LearnerThread,
    Producer,
    account,
    audited,
    endless,
    settings,
    until,
    updated,
)

ONE_STEP: dict[str, Any] = {"epochs": 1, "minibatches": 1}
"""One gradient step to an update."""


@pytest.mark.promise("acknowledged-fragment-trained-dropped")
def test_a_run_trains_every_fragment_and_ends_with_balanced_books(redis_url: str, tmp_path: Path) -> None:
    given = settings(learner={"total_steps": 8 * BATCH})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        sessions = [producer.open("actor-0"), producer.open("actor-1")]
        producer.drive(sessions, lambda: learner.ended)
        result = learner.finish()
    assert (result["updates"], result["env_steps"]) == (8, 8 * BATCH)
    assert (result["ledger"]["trained"], result["ledger"]["dropped"]) == (8 * BATCH // CHARGE, {})
    assert result["staleness"]["max"] <= 2
    assert (tmp_path / "policies" / "final.safetensors").exists()


def test_batches_are_put_together_while_an_update_runs(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold(name: str, _sequence: int = 0) -> None:
        if name == "update.before":
            held.set()
            assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(penstock.learner.learner, "failpoint", hold)
    given = settings(
        algorithm=ONE_STEP | {"staleness": 8},
        learner={"total_steps": 8 * BATCH, "prefetch_batches": 3},
    )
    with LearnerThread(redis_url, tmp_path, given) as running, Producer(redis_url) as producer:
        session, before = producer.open(), _assembled()
        try:
            producer.drive([session], lambda: _assembled() - before >= 1 + 3 + 1)
            assert held.wait(PATIENCE_S)
        finally:
            go_on.set()
        producer.drive([session], lambda: running.ended)
        assert running.finish()["updates"] == 8


def _assembled() -> int:
    (family,) = metrics.UPDATE_SECONDS.labels("assemble").collect()
    return int(next(sample.value for sample in family.samples if sample.name.endswith("_count")))


@pytest.mark.promise("trained-steps-count-towards", "stale-invalid-quarantined-finite")
def test_stale_fragments_are_dropped_and_only_trained_steps_count_to_the_end(
    redis_url: str, tmp_path: Path
) -> None:
    given = settings(algorithm=ONE_STEP | {"stale_after": 100}, learner={"total_steps": 2 * BATCH})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.status().settled >= 4 * BATCH // CHARGE, update=1000)
        producer.drive([session], lambda: learner.ended)
        result = learner.finish()
    assert result["ledger"]["dropped"].keys() == {"stale"}
    assert (result["ending"], result["updates"], result["env_steps"]) == ("steps", 2, 2 * BATCH)


ENDED = np.zeros((STEPS, SLOTS), bool)
ENDED[-1, 0] = True
OUTSIDE = np.zeros((STEPS, SLOTS), np.int64)
OUTSIDE[1, 1] = 2
ABSURD = np.full((STEPS, SLOTS), 3e38, np.float32)


@pytest.mark.promise("stale-invalid-quarantined-finite", "tensor-held-against-space")
@pytest.mark.parametrize(
    "broken",
    [{"truncated": ENDED}, {"action": OUTSIDE}],
    ids=["no final observation", "an impossible action"],
)
def test_an_unlearnable_fragment_is_invalid_and_its_session_quarantined(
    redis_url: str, tmp_path: Path, broken: dict[str, np.ndarray]
) -> None:
    with LearnerThread(redis_url, tmp_path, endless()) as learner, Producer(redis_url, tmp_path) as producer:
        hostile, honest = producer.open("hostile"), producer.open("honest")
        until(lambda: producer.send_with_credit(hostile, 1, **broken), "credit")
        assert producer.send_with_credit(hostile) > 0
        producer.drive([honest], lambda: '"quarantined"' in producer.status().learner_json)
        updated(producer, honest, 1)
        dropped, found = learner.drain()["ledger"]["dropped"], audited(tmp_path, redis_url)
    assert found["invalid"] == dropped["invalid"] >= 1
    assert found["quarantined"] == dropped["quarantined"] >= 1


def _damage(producer: Producer, session: int, honest: int) -> None:
    """Send what cannot be learned from until the session is closed in words."""
    until(lambda: producer.send_with_credit(session, 1, action=OUTSIDE), "credit")
    producer.drive([honest], lambda: producer.refusal(session) != "")
    assert "invalid: the learner closed this session: log entry" in producer.refusal(session)


@pytest.mark.promise("session-closed-damage-actor")
def test_damage_closes_a_session_in_words_and_the_third_in_a_row_ends_its_actor(
    redis_url: str, tmp_path: Path
) -> None:
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, endless()) as learner:
            honest = producer.open("honest")
            for _ in range(MOST_DAMAGED):
                _damage(producer, producer.open("hostile"), honest)
            told = producer.open_refusal("hostile")
            assert "3 sessions in a row of this actor sent experience that cannot" in told
            assert producer.refusal(honest) == producer.open_refusal("another") == ""
            assert learner.drain()["ledger"]["dropped"]["invalid"] == MOST_DAMAGED
        with LearnerThread(redis_url, tmp_path, endless(), resume=True):
            assert producer.open("hostile"), "a learner that begins forgets who was refused"
    assert audited(tmp_path, redis_url)["invalid"] == MOST_DAMAGED


@pytest.mark.promise("session-closed-damage-actor")
def test_one_damaged_payload_costs_an_honest_actor_one_session_and_not_the_run(
    redis_url: str, tmp_path: Path, broker: BrokerProcess
) -> None:
    with (
        Producer(redis_url) as watcher,
        redis.Redis.from_url(redis_url) as client,
        ActorThread(broker.address, "actor-0", ack_journal=str(tmp_path / "journals")),
    ):
        with LearnerThread(redis_url, tmp_path, endless()) as learner:
            until(lambda: watcher.status().latest.update >= 1, "an update")
            learner.drain()
        (before,) = until(lambda: watcher.status().sessions, "the actor")
        until(lambda: watcher.status().log_head > watcher.status().settled, "experience that waits")
        damaged = keys.payload(watcher.status().log_head)
        client.setrange(damaged, 0, b"\xff" * client.strlen(damaged))
        with LearnerThread(redis_url, tmp_path, endless(), resume=True) as learner:
            until(
                lambda: any(
                    row.session > before.session and row.sequence >= 8 for row in watcher.status().sessions
                ),
                "fragments of another session of the actor",
            )
            dropped = learner.drain()["ledger"]["dropped"]
    assert dropped["invalid"] == 1
    assert dropped.get("quarantined", 0) < 2 * BATCH // CHARGE, "what it had credit for, and no more"
    (problem,) = audit(tmp_path, redis=redis_url).problems
    assert "is not what its actor recorded" in str(problem)


@pytest.mark.promise("session-quarantined-good-next")
def test_a_restarted_learner_closes_what_the_one_before_could_not(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(name: str, _sequence: int = 0) -> None:
        if name == "lease.waiting":
            raise Interrupted

    with Producer(redis_url, tmp_path) as producer:
        with monkeypatch.context() as held, LearnerThread(redis_url, tmp_path, endless()) as learner:
            held.setattr(penstock.learner.lease, "failpoint", hold)
            hostile, honest = producer.open("hostile"), producer.open("honest")
            until(lambda: producer.send_with_credit(hostile, 1, action=OUTSIDE), "credit")
            updated(producer, honest, 1)
            before = learner.drain()["ledger"]["dropped"]
        assert producer.refusal(hostile) == ""
        with LearnerThread(redis_url, tmp_path, endless(), resume=True) as learner:
            producer.drive([honest], lambda: producer.refusal(hostile) != "")
            after = learner.drain()["ledger"]["dropped"]
    assert before == after == {"invalid": 1}
    assert audited(tmp_path, redis_url)["invalid"] == 1


@pytest.mark.promise("stale-invalid-quarantined-finite", "actor-reports-version-acts")
def test_a_wrong_probe_answer_quarantines_a_session(redis_url: str, tmp_path: Path) -> None:
    given = settings(learner={"total_steps": 10**9, "lease_ttl_s": 0.6})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url, tmp_path) as producer:
        wrong, right = producer.open("wrong"), producer.open("right")
        producer.drive([wrong, right], lambda: producer.status().latest.update >= 1)
        producer.answer_probe(wrong, (1.0, 2.0, 3.0, 4.0))
        producer.drive([wrong, right], lambda: '"quarantined"' in producer.status().learner_json)
        updated(producer, right, 1)
        assert learner.drain()["ledger"]["dropped"]["quarantined"] >= 1
    assert audited(tmp_path, redis_url)["quarantined"] > 0


@pytest.mark.promise("stale-invalid-quarantined-finite", "update-fails-exception-number")
def test_a_fragment_that_fails_an_update_is_left_out_and_booked(redis_url: str, tmp_path: Path) -> None:
    given = settings(algorithm=ONE_STEP | {"stale_after": 100})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url, tmp_path) as producer:
        session = producer.open()
        until(lambda: producer.send_with_credit(session, 1, reward=ABSURD), "credit")
        producer.drive([session], lambda: learner.ended)
        result = learner.finish()
    assert result["ledger"]["dropped"] == {"nan": 1}
    assert result["env_steps"] == result["ledger"]["trained"] * CHARGE
    assert audited(tmp_path, redis_url)["nan"] == 1


@pytest.mark.promise("three-batches-row-finite")
def test_three_batches_that_are_not_finite_end_the_run_and_are_booked(redis_url: str, tmp_path: Path) -> None:
    given = settings(algorithm=ONE_STEP | {"stale_after": 100})
    with Producer(redis_url) as producer:
        with LearnerThread(redis_url, tmp_path, given) as learner:
            session = producer.open()
            producer.drive([session], lambda: learner.ended, reward=ABSURD)
            with pytest.raises(RunFailed, match="3 updates in a row were not finite"):
                learner.finish()
        with LearnerThread(redis_url, tmp_path, given, resume=True) as learner:
            session, sent = producer.open(), producer.acked
            producer.drive([session], lambda: producer.acked >= sent + 8)
            result = learner.drain()
    assert result["ledger"]["dropped"]["nan"] >= 3 * BATCH // CHARGE
    assert list((tmp_path / "evidence").glob("nan-*.safetensors"))


@pytest.mark.promise("session-whose-batches-fail")
@pytest.mark.parametrize("batch", [CHARGE, 2 * CHARGE])
def test_one_session_whose_batches_all_fail_does_not_end_the_run(
    redis_url: str, tmp_path: Path, batch: int
) -> None:
    given = settings(
        algorithm=ONE_STEP | {"batch_steps": batch, "stale_after": 100}, learner={"total_steps": 8 * BATCH}
    )
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url, tmp_path) as producer:
        poisoner, honest = producer.open("poisoner"), producer.open("honest")
        producer.drive([poisoner], lambda: '"quarantined"' in producer.status().learner_json, reward=ABSURD)
        producer.drive([honest], lambda: learner.ended)
        result = learner.finish()
    assert result["ledger"]["dropped"]["nan"] == 3 * batch // CHARGE
    assert result["ledger"]["trained"] >= 8 * BATCH // CHARGE
    assert audited(tmp_path, redis_url)["quarantined"] > 0


@pytest.mark.promise("log-fills-up-checkpointed")
def test_a_log_that_fills_up_makes_the_learner_checkpoint_early(redis_url: str, tmp_path: Path) -> None:
    given = settings(broker={"max_log_bytes": 40_000}, learner={"total_steps": 60 * BATCH})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        result = learner.finish()
        assert producer.status().trim_floor > 0
    assert len((tmp_path / "lineage.jsonl").read_text().splitlines()) >= 4
    assert result["updates"] == 60


def test_an_unanswered_evaluation_takes_no_time_from_the_last_one(redis_url: str, tmp_path: Path) -> None:
    given = settings(evaluation={"timeout_s": 2, "episodes": 2, "interval_steps": 10 * BATCH})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session, judge = producer.open(), producer.open("judge", role=Role.EVALUATION)
        producer.drive([session], lambda: producer.evaluate_version(judge) > 0)
        unanswered = producer.evaluate_version(judge)
        producer.drive([session], lambda: producer.evaluate_version(judge) > unanswered)
        last = producer.evaluate_version(judge)
        producer.report(judge, [1.0, 3.0], version=last, evaluation=True)
        result = learner.finish()
    assert (result["ending"], result["evaluation"]["version"]) == ("steps", last)
    assert redis.Redis.from_url(redis_url).scard(keys.PINS) == 0


def test_the_schema_of_the_tests_is_that_of_cartpole() -> None:
    assert make_model(settings()).specification.schema.schema_id == SCHEMA.schema_id


def impatient(**algorithm: Any) -> Settings:
    return settings(algorithm=ONE_STEP | algorithm, learner={"total_steps": 10**9, "stall_timeout_s": 2})


def failed(learner: LearnerThread) -> str:
    """The words with which the run has failed; its books balance all the same."""
    with pytest.raises(RunFailed) as caught:
        learner.finish()
    told = account(learner.run_dir)
    assert (told["ending"], told["finished"], told["ledger"]["balanced"]) == ("stalled", False, True)
    assert "no update for 2 s (learner.stall_timeout_s): " in str(caught.value)
    return str(caught.value)


@pytest.mark.promise("healthz-role-turns-red")
def test_a_run_without_actors_reports_it(redis_url: str, tmp_path: Path) -> None:
    with LearnerThread(redis_url, tmp_path, impatient()) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        producer.close(session)
        producer.open("evaluator", Role.EVALUATION)
        assert "no rollout worker has an open session" in failed(learner)


def test_a_run_whose_weights_reach_no_actor_reports_it(redis_url: str, tmp_path: Path) -> None:
    given = impatient(stale_after=3)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended, update=1000)
        text = failed(learner)
    assert "all that arrived was dropped (" in text
    assert " stale)" in text
    assert "no actor acts with the newest weights: actor-0 acts with version 0, version 1" in text


def test_a_paused_run_is_not_reported_as_stalled(redis_url: str, tmp_path: Path) -> None:
    with LearnerThread(redis_url, tmp_path, impatient()) as learner, Producer(redis_url) as producer:
        producer.open()
        producer.control("pause")
        until(lambda: producer.status().desired.name == "PAUSED", "the pause")
        pause = threading.Event()
        for _ in range(40):  # twice as long as it may stand still
            assert not learner.ended
            pause.wait(0.1)
        producer.control("resume")
        failed(learner)
