"""A learner of two ranks: one run, one lease, one set of books, whatever happens to either process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.config.settings import Settings, dump
from penstock.launch.audit.audit_command import audit
from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from tests.support.run.broker_process import BrokerProcess, eventually
from tests.support.run.learner_run import BATCH, SLOTS, STEPS, Producer, account, audited, settings, until
from tests.support.run.training import Training, is_alive, wait_until_gone

LEARNER: Final = (sys.executable, "-P", "-m", "penstock.launch.cli", "learner")
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
PATIENCE_S: Final = 200.0


def endless(**learner: Any) -> Settings:
    """A run that only ends when it is asked to."""
    return settings(
        learner={"total_steps": 10**9, "checkpoint_interval_s": 3600, "stop_at_target": False} | learner
    )


class TwoRanks:
    """The processes, and where each says that it can be reached."""

    def __init__(self, folder: Path, url: str, given: Settings, *, torchrun: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = folder
        self.log = folder / "learner.log"
        self._endpoint = folder / "learner.json.endpoint"
        config = folder / "run.toml"
        config.write_text(dump(given))
        words = ("--redis", url, "--run-dir", str(folder), "--config", str(config), "--resume")
        before = (sys.executable, *TORCHRUN, "--no-python") if torchrun else ()
        environment = {**os.environ, ENDPOINT_VARIABLE: str(self._endpoint), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                (*before, *LEARNER, *words), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def pid(self, rank: int) -> int:
        """Of a rank; 0 before it has said so."""
        endpoint = read_endpoint(self._file(rank))
        return 0 if endpoint is None else endpoint.pid

    def page(self, rank: int, path: str) -> tuple[int, str]:
        """A page of a rank's HTTP port."""
        return BrokerProcess(process=self.process, endpoint_file=self._file(rank), log=self.log).get(path)

    def are_ready(self) -> bool:
        """Both."""
        assert self.process.poll() is None
        return all(self._file(rank).exists() and self.page(rank, "/readyz")[0] == 200 for rank in (0, 1))

    def end(self) -> int:
        """Ask all to end; exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def _file(self, rank: int) -> Path:
        return self._endpoint.with_stem(f"{self._endpoint.stem}-{rank}") if rank else self._endpoint


@contextmanager
def two_ranks(folder: Path, url: str, given: Settings, *, torchrun: bool = False) -> Iterator[TwoRanks]:
    """Killed at the end, with all that they have started."""
    ranks = TwoRanks(folder, url, given, torchrun=torchrun)
    try:
        eventually(ranks.are_ready, "both ranks", PATIENCE_S)
        yield ranks
    except BaseException:
        sys.stderr.write(ranks.log.read_text()[-8000:])
        raise
    finally:
        for pid in {ranks.process.pid, ranks.pid(0), ranks.pid(1)} - {0}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        ranks.process.wait(PATIENCE_S)


def test_two_ranks_train_one_run_and_drain_together(redis_url: str, tmp_path: Path) -> None:
    with (
        Producer(redis_url, tmp_path) as producer,
        two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks,
    ):
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        bad = np.full((STEPS, SLOTS), np.nan, np.float32)
        until(lambda: producer.send_with_credit(session, reward=bad), "credit")
        # Who sent it is quarantined, so that another actor has to go on.
        other = producer.open("actor-1")
        producer.drive([other], lambda: producer.status().latest.update >= 5)
        others = ranks.pid(1)
        for rank in (0, 1):
            assert ranks.page(rank, "/healthz") == ranks.page(rank, "/readyz") == (200, "ok\n")
            shown = ranks.page(rank, "/metrics")[1].splitlines()
            assert {"penstock_ranks 2.0", f"penstock_rank {rank}.0"} <= set(shown)
        assert any(
            row.startswith("penstock_rank_updates_total") and not row.endswith(" 0.0") for row in shown
        )
        assert not any(row.startswith("penstock_mean_return") for row in shown), (
            "a rank has no run of its own"
        )
        assert ranks.end() == 0
        eventually(lambda: not is_alive(others), "the end of the other rank", PATIENCE_S)
    assert account(tmp_path)["ledger"]["balanced"]
    assert account(tmp_path)["ledger"]["dropped"]["invalid"] >= 1
    assert (tmp_path / "checkpoints").exists()
    assert audited(tmp_path, redis_url)["trained"] >= 5 * BATCH // (STEPS * SLOTS)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_takes_the_other_along(redis_url: str, tmp_path: Path, victim: int) -> None:
    with Producer(redis_url) as producer, two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        other = ranks.pid(1 - victim)
        os.kill(ranks.pid(victim), signal.SIGKILL)
        assert ranks.process.wait(PATIENCE_S) != 0
        eventually(lambda: not is_alive(other), "the end of the other rank", PATIENCE_S)
    if victim:
        assert "rank 1 of this learner ended (-9)" in ranks.log.read_text()


@pytest.mark.promise("rank-learner-dies-ranks")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_all_ranks_again_from_the_checkpoint(
    redis_url: str, tmp_path: Path, victim: int
) -> None:
    with (
        Producer(redis_url, tmp_path) as producer,
        two_ranks(tmp_path, redis_url, endless(), torchrun=True) as ranks,
    ):
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        producer.control("checkpoint")
        until(lambda: list((tmp_path / "checkpoints").glob("0*")), "a checkpoint")
        producer.drive([session], lambda: producer.status().latest.update >= 5)
        status, before = producer.status(), {ranks.pid(0), ranks.pid(1)}
        os.kill(ranks.pid(victim), signal.SIGKILL)
        eventually(lambda: producer.status().epoch > status.epoch, "the learner's return", PATIENCE_S)
        producer.drive([session], lambda: producer.status().latest.update >= status.latest.update + 3)
        assert not before & {ranks.pid(0), ranks.pid(1)}
        ranks.end()
        until(lambda: (tmp_path / "learner.json").exists(), "the account")
    assert json.loads((tmp_path / "learner.json").read_text())["ledger"]["balanced"]
    assert audited(tmp_path, redis_url)["trained"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_goes_on_when_a_rank_of_its_learner_is_killed(tmp_path: Path) -> None:
    training = Training(
        tmp_path / "run",
        *("CartPole-v1", "--ranks", "2", "--total-steps", "100000000"),
        *("--set", f"actor.ack_journal={tmp_path / 'acknowledged'}"),
        *("--set", "learner.stop_at_target=false", "--set", "learner.checkpoint_interval_s=1"),
    )
    try:
        training.until_steps(4_000)
        file = training.run_dir / "endpoints" / "learner-1.json"
        endpoint = read_endpoint(file)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        training.until_steps(training.steps() + 8_000)
        training.process.send_signal(signal.SIGINT)
        code, _, err = training.end(PATIENCE_S)
        assert code == 130, err
    finally:
        training.process.kill()
        training.process.communicate()
        wait_until_gone(training)
    (learner,) = [one for one in training.summary()["processes"] if one["role"] == "learner"]
    assert learner["restarts"] >= 1
    verdict = audit(training.run_dir)
    assert verdict.clean, verdict.problems
    assert training.summary()["ledger"]["balanced"]
