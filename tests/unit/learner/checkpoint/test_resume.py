"""From which checkpoint a learner begins: that which Redis says was committed, or else the newest on disk."""

import shutil
from pathlib import Path

import pytest

from penstock.broker.log.replies import Commit, Lease
from penstock.learner.checkpoint.checkpointer import choose
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.learner.ledger import Progress
from penstock.runtime.exit import Fatal

COMMITTED, WRITTEN = "000001-1", "000001-2"
RESUME = ResumeOptions(resume=True)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints, of which the learner died before it committed the newer one."""
    made = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for position, name in ((4, COMMITTED), (8, WRITTEN)):
        made.write(name, {}, Progress(run="r", sections={}, position=position).to_json())
    return made


def committed(store: CheckpointStore) -> Commit:
    """The commit of the older one."""
    digest = store.read(COMMITTED).manifest_sha256
    return Commit(checkpoint_id=COMMITTED, manifest_sha256=digest, position=4, trim=0)


def test_a_checkpoint_that_was_written_and_never_committed_does_not_count(store: CheckpointStore) -> None:
    lease = Lease(epoch=2, fresh=False, closed=False, committed=(committed(store),), head=9)
    beginning = choose(lease, store, RESUME)
    assert beginning.checkpoint is not None
    assert (beginning.checkpoint.id, beginning.ledger.position) == (COMMITTED, 4)
    assert [commit.checkpoint_id for commit in beginning.lineage] == [COMMITTED]


def test_nothing_was_committed_so_a_run_begins_at_its_first_entry(store: CheckpointStore) -> None:
    beginning = choose(Lease(epoch=2, fresh=False, closed=False, head=9), store, RESUME)
    assert (beginning.checkpoint, beginning.ledger.position) == (None, 0)


def test_a_redis_that_knows_older_checkpoints_alone_is_told_from_one_that_lost_nothing(
    store: CheckpointStore,
) -> None:
    known = committed(store)
    shutil.rmtree(store.directory / COMMITTED)
    lease = Lease(epoch=2, fresh=False, closed=False, committed=(known,), head=9, trim_floor=3)
    with pytest.raises(Fatal, match=f"gone back in time.*{COMMITTED}.*{WRITTEN}.*empty its folder"):
        choose(lease, store, RESUME)
    begun = choose(lease, store, ResumeOptions(resume=True, allow_loss=True))
    assert (begun.checkpoint, begun.ledger.position) == (None, 3)
    untrimmed = Lease(epoch=2, fresh=False, closed=False, committed=(known,), head=9)
    begun = choose(untrimmed, store, RESUME)  # the log still holds all of it
    assert (begun.checkpoint, begun.ledger.position) == (None, 0)


def test_the_newest_on_disk_counts_where_redis_holds_no_run(store: CheckpointStore) -> None:
    beginning = choose(Lease(epoch=2, fresh=True, closed=True), store, RESUME)
    assert beginning.checkpoint is not None
    assert (beginning.checkpoint.id, beginning.ledger.position) == (WRITTEN, 8)
