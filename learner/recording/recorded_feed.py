"""From a recording to batches: the loop's feed in place of the log's. Reads ahead in its own thread.

    a learner's recording    its batches, once, as they were consumed: equal settings learn equal weights
    a policy's recording     its fragments, once, in batches of the algorithm's own
    an `Imitator`            several passes, each in an order drawn from the run's seed, without the
                             fragments that it validates on

No log entry is consumed, so nothing is accounted: the run's ledger holds what actors sent, and none did.
Batches that were taken are counted, and the count is kept in checkpoints.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from penstock.learner.algorithms.algorithm import Algorithm, Imitator
from penstock.learner.batch import assemble
from penstock.learner.feed.recorded_event import RecordedEvent
from penstock.learner.feed.source import FeedEnded, Flush, LogBatch, reward_of
from penstock.learner.recording.reader import Recording
from penstock.learner.recording.recording_index import FrameEntry
from penstock.runtime import metrics

_PUT_WAIT_S: Final = 0.2
_VALIDATION_STEPS: Final = 8192
"""Most steps that are held out: they are evaluated after every update."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    entries: tuple[FrameEntry, ...]
    round: int | None
    replayed: bool
    """As it was consumed, so its staleness means what it meant."""
    event: RecordedEvent | None = None
    flush: int = 0


class RecordedFeed:
    """The `Feed` of a learner without actors."""

    def __init__(
        self,
        recording: Recording,
        algorithm: Algorithm,
        *,
        seed: int,
        device: torch.device,
        prefetch: int,
        taken: int,
        stop: threading.Event,
    ) -> None:
        """Prepare to read.

        Args:
            recording: the recording to read.
            algorithm: decides the batches where the recording has none.
            seed: of the order of an `Imitator`'s passes.
            device: to which batches are moved.
            prefetch: batches that are read ahead.
            taken: batches that an earlier process of the run has consumed.
            stop: ends `run`.
        """
        self._recording = recording
        self._algorithm = algorithm
        self._seed = seed
        self._device = device
        self._stop = stop
        self._queue: queue.Queue[LogBatch | None] = queue.Queue(maxsize=prefetch)
        self._held_out: frozenset[FrameEntry] = frozenset()
        self._taken_before = taken
        self._is_exhausted = False

    def hold_out(self) -> None:
        """Give an `Imitator` the fragments that it validates on; before `run`."""
        if not isinstance(self._algorithm, Imitator) or not self._algorithm.validation:
            return
        entries = self._recording.fragments
        order = np.random.default_rng([self._seed, 0]).permutation(len(entries))
        wanted = max(1, round(self._algorithm.validation * len(entries)))
        held: list[FrameEntry] = []
        steps = 0
        for index in order[:wanted]:
            steps += entries[index].charge
            if held and steps > _VALIDATION_STEPS:
                break
            held.append(entries[index])
        self._held_out = frozenset(held)
        loaded = self._recording.load([entry for entry in entries if entry in self._held_out])
        self._algorithm.validate_on(assemble(loaded, self._device))

    # ---- the loop's side

    def take(self, timeout_s: float) -> LogBatch | None:
        """Return the next batch; None when there is none within `timeout_s` seconds.

        Raises FeedEnded where the recording is at its end.
        """
        try:
            log_batch = None if self._is_exhausted else self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if log_batch is None:
            self._is_exhausted = True
            raise FeedEnded
        return log_batch

    def drop_before(self, version: int) -> None:
        """Do nothing: what was dropped when it was recorded is in no batch of the recording."""

    def flush(self, flush: Flush) -> None:
        """Raise NotImplementedError: in a recording nothing is pending."""
        raise NotImplementedError("the run learns from a recording, in which nothing is pending")

    def too_few(self, number: int) -> int | None:
        """See `Feed`."""
        return None

    def skipped(self) -> None:
        """Do nothing: a recording has no fragments of a later turn to judge."""

    # ---- the thread

    def run(self) -> None:
        """Read until the recording is at its end, or `stop` is set."""
        batches = self._recording.batches
        if batches and batches[0].entry.update:
            words = {"first_update": batches[0].entry.update}
            log.warning(
                "the recording begins in the middle of a run: it can be learned from, not repeated",
                extra=words,
            )
        planned = itertools.islice(self._plan(), self._taken_before, None)
        for count, batch in enumerate(planned, self._taken_before + 1):
            if not self._put(self._deliver(batch, count)):
                return
        self._put(None)

    def _put(self, log_batch: LogBatch | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(log_batch, timeout=_PUT_WAIT_S)
            except queue.Full:
                continue
            return True
        return False

    def _plan(self) -> Iterator[_Planned]:
        if isinstance(self._algorithm, Imitator):
            yield from self._passes(self._algorithm.passes)
        elif self._recording.batches:
            for batch in self._recording.entries:
                if isinstance(batch, RecordedEvent):
                    yield _Planned((), None, replayed=True, event=batch)
                elif batch.fragments:
                    round_ = batch.entry.round if self._algorithm.lock_step else None
                    yield _Planned(batch.fragments, round_, replayed=True, flush=batch.entry.flush)
        else:
            yield from self._formed(self._recording.fragments)

    def _passes(self, count: int) -> Iterator[_Planned]:
        entries = [entry for entry in self._recording.fragments if entry not in self._held_out]
        for number in range(1, count + 1):
            order = np.random.default_rng([self._seed, number]).permutation(len(entries))
            yield from self._formed([entries[index] for index in order])

    def _formed(self, entries: Sequence[FrameEntry]) -> Iterator[_Planned]:
        """Yield batches as the algorithm takes them; the last may be smaller."""
        waiting: list[FrameEntry] = []
        charge = 0
        for entry in entries:
            waiting.append(entry)
            charge += entry.charge
            if self._algorithm.makes_batch(len(waiting), charge):
                yield _Planned(tuple(waiting), None, replayed=False)
                waiting, charge = [], 0
        if waiting:
            yield _Planned(tuple(waiting), None, replayed=False)

    def _deliver(self, planned: _Planned, count: int) -> LogBatch:
        """A batch or event. count: of the recording, up to this one."""
        started = time.perf_counter()
        loaded = self._recording.load(planned.entries)
        headers = [header for header, _ in loaded]
        log_batch = LogBatch(
            last=0,
            trained=(),
            dropped={},
            steps=sum(int(arrays["valid"].sum()) for _, arrays in loaded),
            updates=tuple(header.oldest_update for header in headers) if planned.replayed else (),
            versions=(),
            batch=assemble(loaded, self._device) if loaded else None,
            round=planned.round,
            size=0,
            # Of now: what lies on disk has not waited for the learner.
            created_us=time.time_ns() // 1000,
            assemble_s=time.perf_counter() - started,
            origins={},
            reward=sum(reward_of(arrays) for _, arrays in loaded),
            recorded=count,
            event=planned.event,
            flush=planned.flush,
        )
        metrics.UPDATE_SECONDS.labels("assemble").observe(log_batch.assemble_s)
        return log_batch
