"""What a checkpoint says of itself in the lineage."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.config.settings import OnPolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState, LogShare
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Ledger, Progress
from tests.support.fleet.one_parameter_learner import OneParameter, make_model, resolve
from tests.support.run.broker_process import open_run
from tests.support.run.small_run import RUN


class Overtaken(OneParameter):
    """Its weights are published while a checkpoint is made of it: the publisher has a thread of its own."""

    def __init__(self, section: OnPolicySection, publish: Callable[[], object]) -> None:
        super().__init__(section)
        self._publish = publish

    def state(self) -> AlgorithmState:
        self._publish()
        return super().state()


def test_the_lineage_names_the_version_that_its_checkpoint_knows(redis_url: str, tmp_path: Path) -> None:
    given = resolve(RUN, [])
    log = open_run(redis_url)
    known = log.snapshot().version
    lease = LeaseKeeper(
        log,
        15.0,
        stop=threading.Event(),
        quarantine=make_model(given, 4).quarantine,
        on_reopened=lambda: None,
        description=lambda: "{}",
    )
    store, lineage = CheckpointStore(tmp_path / "checkpoints", 3), tmp_path / "lineage.jsonl"
    assert isinstance(given.algorithm, OnPolicySection)
    algorithm = Overtaken(given.algorithm, lambda: log.publish(b"weights-2", update=1, settled=0, scalars={}))
    checkpointer = Checkpointer(
        store,
        log,
        lease,
        Ledger(),
        algorithm,
        lineage=(),
        lineage_path=lineage,
        interval_s=3600,
        room=LogShare(size=2**20, entries=1000),
    )
    checkpointer.save(Progress(run=RUN, sections={}, log=lease.learner_log.snapshot()))
    (line,) = map(json.loads, lineage.read_text().splitlines())
    checkpoint = store.read(line["checkpoint"])
    assert line["version"] == checkpoint.state["log"]["version"] == known
    assert log.snapshot().version == known + 1
    log.close()
