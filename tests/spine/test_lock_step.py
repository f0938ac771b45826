"""Staleness 0: rounds instead of a budget, and equal runs are equal bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import Settings
from tests.support.run.learner_run import CHARGE, LearnerThread, Producer, learner_process, settings, until
from tests.support.storage.redis_server import RedisServer

ROUNDS = 12


def lock_step(rounds: int = ROUNDS, actors: int = 2) -> Settings:
    """Two actors, one fragment each a round."""
    return settings(
        seed=7,
        actor={"unroll_length": 4, "count": actors},
        algorithm={"batch_steps": CHARGE, "epochs": 2, "minibatches": 2, "staleness": 0},
        learner={
            "total_steps": rounds * actors * CHARGE,
            "checkpoint_interval_s": 3600,
            "stop_at_target": False,
        },
    )


def weights_of(run_dir: Path) -> bytes:
    """The final policy."""
    return (run_dir / "policies" / "final.safetensors").read_bytes()


def run_once(server: RedisServer, run_dir: Path, names: tuple[str, str]) -> dict[str, Any]:
    """A whole run; the sessions open and send in the order of `names`."""
    with LearnerThread(server.url, run_dir, lock_step()) as learner, Producer(server.url) as producer:
        sessions = {name: producer.open(name, data=name) for name in names}
        producer.drive(list(sessions.values()), lambda: learner.ended)
        return learner.finish()


def restart_empty(server: RedisServer) -> None:
    """A server that remembers nothing."""
    server.kill()
    server.forget()
    server.start()


@pytest.mark.promise("lock-step-two-runs")
def test_two_runs_are_equal_bit_by_bit_whatever_the_order(redis_server: RedisServer, tmp_path: Path) -> None:
    first = run_once(redis_server, tmp_path / "first", ("actor-0", "actor-1"))
    restart_empty(redis_server)
    second = run_once(redis_server, tmp_path / "second", ("actor-1", "actor-0"))
    assert weights_of(tmp_path / "first") == weights_of(tmp_path / "second")
    assert first["updates"] == second["updates"] == ROUNDS
    assert first["staleness"]["max"] == 0
    assert first["ledger"]["balanced"]
    assert second["ledger"]["balanced"]


@pytest.mark.promise("lock-step-run-killed")
def test_a_run_that_was_killed_ends_like_one_that_was_not(redis_server: RedisServer, tmp_path: Path) -> None:
    run_once(redis_server, tmp_path / "whole", ("actor-0", "actor-1"))
    restart_empty(redis_server)
    broken = tmp_path / "broken"
    with Producer(redis_server.url) as producer:
        process = learner_process(redis_server.url, broken, lock_step())
        sessions = [producer.open(name, data=name) for name in ("actor-0", "actor-1")]
        producer.drive(sessions, lambda: producer.status().latest.update >= 3)
        producer.control("checkpoint")
        producer.drive(sessions, lambda: (broken / "lineage.jsonl").exists())
        update = producer.status().latest.update
        producer.drive(sessions, lambda: producer.status().latest.update >= min(update + 2, ROUNDS - 1))
        process.kill()
        process.wait()
        with LearnerThread(redis_server.url, broken, lock_step(), resume=True) as learner:
            producer.drive(sessions, lambda: learner.ended)
            result = learner.finish()
    assert result["updates"] == ROUNDS
    assert result["ledger"]["dropped"] == {}
    assert weights_of(broken) == weights_of(tmp_path / "whole")


@pytest.mark.promise("lock-step-round-continues")
def test_a_round_goes_on_without_an_actor_that_stopped(redis_url: str, tmp_path: Path) -> None:
    given = lock_step(rounds=6, actors=3)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        sessions = [producer.open(f"actor-{index}") for index in range(3)]
        producer.drive(sessions[:2], lambda: producer.acked >= 2)
        assert producer.status().latest.update == 0
        producer.close(sessions[2])
        until(lambda: producer.status().latest.update == 1, "the round of two")
        producer.drive(sessions[:2], lambda: learner.ended)
        result = learner.finish()
    assert result["ledger"]["balanced"]
    assert result["updates"] >= 6
