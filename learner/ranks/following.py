"""The loop of every rank of a learner but rank 0: it computes its part of each update and keeps nothing.

    hear "state" → restore it → [hear "update" → own part of the batch → update → agree] → hear "end"
                                [hear "skip" → own part of the batch → drop it]
                                [hear "restore" → take over → agree]

It connects to Redis to read payloads and writes nothing there. Asked to end by a signal it tells rank 0 with
the next update, and ends with it; when rank 0 is gone it ends at once, with exit 1. Health watches that an
update that has begun is made; waiting for rank 0 is not counted as a stall.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from safetensors.torch import load

from penstock.broker.log.learner_log import LearnerLog
from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import AlgorithmState, Update
from penstock.learner.batch import Staged
from penstock.learner.feed.payloads import OwnPayloads
from penstock.learner.model import Model
from penstock.learner.ranks.leading import RESTORED, FollowingFeed
from penstock.learner.ranks.rendezvous import Meeting
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle, leave

UPDATE: Final = "update"
_TAKE_S: Final = 1.0

log = logging.getLogger(__name__)


def follow(
    lifecycle: Lifecycle,
    settings: Settings,
    meeting: Meeting,
    model: Model,
    health: Health,
    connect: Callable[[], LearnerLog],
) -> int:
    """Make updates until rank 0 ends; returns the exit code. Raises Fatal when rank 0 has failed or is gone.

    model: of this rank. connect: opens the log, from which payloads are read.
    """
    words, data = meeting.turns.hear()
    if words["what"] == "end":
        return _ended(words)
    model.algorithm.load(AlgorithmState(tensors=load(data), numbers=words["numbers"]))
    thread_group = ThreadGroup()
    feed = _make_feed(settings, meeting, model, connect(), thread_group)
    thread_group.start("feed", _ending_all(feed.run))
    health.watch(UPDATE, settings.learner.stall_timeout_s)
    health.suspend(UPDATE)
    health.set_ready(True)
    while True:
        words, data = _hear(meeting)
        if words["what"] == "end":
            return _ended(words)
        health.expect(UPDATE, "its part of the batch did not come, or other ranks did not answer")
        update = _do(words, data, model, feed)
        if update is not None:
            meeting.agree(model.algorithm, update, draining=lifecycle.draining.is_set())
        health.progress(UPDATE)
        health.suspend(UPDATE)


def _do(words: dict[str, Any], data: bytes, model: Model, feed: FollowingFeed) -> Update | None:
    """Do this rank's part of what rank 0 does; returns what all ranks compare, if anything."""
    if words["what"] == "restore":
        model.algorithm.restore(AlgorithmState(tensors=load(data), numbers=words["numbers"]))
        return RESTORED
    staged = _take(feed)
    if words["what"] == "skip":
        return None
    batch = replace(staged.batch, is_flushed=words["is_flushed"])
    update = model.algorithm.update(batch, progress=words["progress"])
    metrics.RANK_UPDATES.inc()
    return update


def _make_feed(
    settings: Settings, meeting: Meeting, model: Model, learner_log: LearnerLog, thread_group: ThreadGroup
) -> FollowingFeed:
    own = OwnPayloads(learner_log, settings, model.specification.schema, model.ranges, model.device)
    prefetch = settings.learner.prefetch_batches
    return FollowingFeed(learner_log, own, meeting.feed, prefetch=prefetch, stop=thread_group.stop)


def _hear(meeting: Meeting) -> tuple[dict[str, Any], bytes]:
    began = time.perf_counter()
    words, data = meeting.turns.hear()
    metrics.RANK_WAIT_SECONDS.inc(time.perf_counter() - began)
    return words, data


def _take(feed: FollowingFeed) -> Staged:
    """Return the batch, which is ready or on its way because rank 0 has it."""
    while (staged := feed.take(_TAKE_S)) is None:
        pass
    return staged


def _ended(words: dict[str, Any]) -> int:
    if words["failed"]:
        raise Fatal("rank 0 of this learner has failed, so this one ends; its log says why")
    log.info("rank 0 has ended")
    return EXIT_OK


def _ending_all(body: Callable[[], None]) -> Callable[[], None]:
    """Return a body that ends the process when it raises.

    The main thread may be waiting for rank 0, which waits for this thread: only this one can end the process.
    """

    def run() -> None:
        try:
            body()
        except Exception as error:
            log.exception("a thread of this rank died")
            sys.stderr.write(f"{error}\n")
            leave(EXIT_FAILED)

    return run
