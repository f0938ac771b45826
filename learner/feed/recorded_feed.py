"""A recording, and the feed of a learner that trains on it in place of the log.

    a learner's recording    its batches, once, as they were consumed: equal settings learn equal weights
    a policy's recording     its fragments, once, in batches of the algorithm's own
    an `Imitator`            several passes, each in an order drawn from the run's seed, without the
                             fragments that it validates on

No log entry is consumed, so the ledger stays empty; checkpoints hold the count of batches taken. The content
is not trusted: checksums of frames are verified, and fragments are checked against the recording's schema.
"""

import base64
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import torch

from penstock.config.settings import ConfigurationError
from penstock.learner.algorithms.algorithm import Algorithm, Imitator
from penstock.learner.batch import Loaded, assemble, check_meaning, reward_of
from penstock.learner.feed.log_feed import Flush, LogBatch, ReadAhead
from penstock.learner.feed.recording import (
    DESCRIPTION,
    FORMAT,
    FrameEntry,
    Kind,
    Torn,
    find_entries,
    frames_file,
    read_frame,
)
from penstock.protocol import fragment as wire
from penstock.protocol.schema import Ranges
from penstock.protocol.spaces import Dict
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal

_VALIDATION_STEPS: Final = 8192
"""Most steps that are held out, since they are evaluated after every update."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Fragments that were consumed as one batch, in its order. entry: of the frame that records it."""

    entry: FrameEntry
    fragments: tuple[FrameEntry, ...]


class Recording:
    """Reads a recording that is not being written; raises ConfigurationError for a folder that holds none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            description = json.loads((folder / DESCRIPTION).read_bytes())
            known = description["format"] == FORMAT
            encoded = base64.b64decode(description["specification"])
            self.specification = RunSpecification.decode(encoded)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{folder}: holds no {DESCRIPTION}, so no recording; `learner.record` or `penstock "
                "record` makes one"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{folder / DESCRIPTION}: cannot be read: {error}") from error
        if not known:
            raise ConfigurationError(f"{folder / DESCRIPTION}: format {description['format']}, not {FORMAT}")
        self._entries = find_entries(folder)

    @cached_property
    def fragments(self) -> tuple[FrameEntry, ...]:
        return tuple(entry for entry in self._entries if entry.kind == Kind.FRAGMENT)

    @cached_property
    def entries(self) -> tuple[RecordedBatch | FrameEntry, ...]:
        """Batches, and entries of events, in the order in which a learner met them."""
        found: list[RecordedBatch | FrameEntry] = []
        since: list[FrameEntry] = []
        for entry in self._entries:
            if entry.kind == Kind.FRAGMENT:
                since.append(entry)
            elif entry.kind == Kind.EVENT:
                if entry.action not in ("checkpoint", "restore"):
                    place = f"{entry.offset} of file {entry.file}"
                    raise Fatal(f"the event at {place} is {entry.action!r}, which is unknown")
                found.append(entry)
            else:
                found.append(RecordedBatch(entry, tuple(since)))
                since = []
        return tuple(found)

    @property
    def batches(self) -> tuple[RecordedBatch, ...]:
        """Return the batches that a learner consumed; () where the recording was made without one."""
        return tuple(one for one in self.entries if isinstance(one, RecordedBatch))

    @cached_property
    def _ranges(self) -> Ranges:
        """The ranges of its spaces; the policy's state must only be finite."""
        spaces = self.specification
        return Ranges.of_run(spaces.observation_space, spaces.action_space, Dict(()))

    def check_schema(self, schema_id: str) -> None:
        """Raise ConfigurationError unless its fragments are those of a run with that schema."""
        if self.specification.schema.schema_id != schema_id:
            raise ConfigurationError(
                f"{self.folder}: recorded from {self.specification.run!r} with observations "
                f"{self.specification.observation_space} and actions {self.specification.action_space}; "
                "this run has others: name the environment that it was recorded in"
            )

    def load(self, entries: Sequence[FrameEntry]) -> list[Loaded]:
        """Return checked fragments; raises Fatal for one that is damaged or does not follow the schema."""
        return [self._open(entry) for entry in entries]

    def _open(self, entry: FrameEntry) -> Loaded:
        path = frames_file(self.folder, entry.file)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                frame = read_frame(file)
            if frame is None:
                raise Torn("the file ends before it")
            fragment = wire.Fragment(wire.parse_header(frame.head), frame.body)
            wire.check(fragment, self.specification.schema, self.specification.run)
            arrays = check_meaning(fragment.header, fragment.arrays(), self._ranges)
        except (ValueError, OSError) as error:
            raise Fatal(f"{path}: the fragment at {entry.offset} cannot be used: {error}") from error
        return fragment.header, arrays


_Planned = tuple[FrameEntry | None, tuple[FrameEntry, ...]]
"""The frame of an event, or of a batch that is repeated as it was consumed, and the fragments of that batch.

None: the batch is formed anew.
"""


class FeedEnded(Exception):
    """Raised by `take` when all of a recording was taken."""


@dataclass(eq=False)
class RecordedFeed:
    """The batches of a learner without actors; it has the methods of a `LogFeed`, and nothing is pending.

    seed: of the order of an `Imitator`'s passes. taken: batches that earlier processes have consumed.
    """

    recording: Recording
    algorithm: Algorithm
    _: KW_ONLY
    seed: int
    device: torch.device
    prefetch: InitVar[int]
    taken: int
    stop: InitVar[threading.Event]

    def __post_init__(self, prefetch: int, stop: threading.Event) -> None:
        self._ahead = ReadAhead[LogBatch](prefetch, stop)
        self._held_out: frozenset[FrameEntry] = frozenset()
        self._is_read = False

    def hold_out(self) -> None:
        """Give an `Imitator` the fragments to validate on; call it before `run`."""
        if not isinstance(self.algorithm, Imitator) or not self.algorithm.validation:
            return
        entries = self.recording.fragments
        order = np.random.default_rng([self.seed, 0]).permutation(len(entries))
        wanted = max(1, round(self.algorithm.validation * len(entries)))
        held: list[FrameEntry] = []
        steps = 0
        for index in order[:wanted]:
            steps += entries[index].charge
            if held and steps > _VALIDATION_STEPS:
                break
            held.append(entries[index])
        self._held_out = frozenset(held)
        loaded = self.recording.load([entry for entry in entries if entry in self._held_out])
        self.algorithm.validate_on(assemble(loaded, self.device))

    # ---- the loop's side

    def take(self, timeout_s: float) -> LogBatch | None:
        was_read = self._is_read
        log_batch = self._ahead.take(timeout_s)
        if log_batch is None and was_read:
            raise FeedEnded
        return log_batch

    def flush(self, flush: Flush) -> None:
        raise NotImplementedError("the run learns from a recording, in which nothing is pending")

    def too_few(self, number: int) -> None:
        """Return None: there is no flush."""

    def drop_before(self, version: int) -> None:
        """Drop nothing."""

    def skipped(self) -> None:
        """Do nothing: staleness is not judged."""

    # ---- the thread

    def run(self) -> None:
        batches = self.recording.batches
        if batches and batches[0].entry.update:
            words = {"first_update": batches[0].entry.update}
            log.warning(
                "the recording begins in the middle of a run: it can be learned from, not repeated",
                extra=words,
            )
        planned = itertools.islice(self._plan(), self.taken, None)
        for count, batch in enumerate(planned, self.taken + 1):
            if not self._ahead.put(self._deliver(batch, count)):
                return
        self._is_read = True

    def _plan(self) -> Iterator[_Planned]:
        if isinstance(self.algorithm, Imitator):
            yield from self._passes(self.algorithm.passes)
        elif self.recording.batches:
            for one in self.recording.entries:
                if isinstance(one, FrameEntry):
                    yield one, ()
                elif one.fragments:
                    yield one.entry, one.fragments
        else:
            yield from self._formed(self.recording.fragments)

    def _passes(self, count: int) -> Iterator[_Planned]:
        entries = [entry for entry in self.recording.fragments if entry not in self._held_out]
        for number in range(1, count + 1):
            order = np.random.default_rng([self.seed, number]).permutation(len(entries))
            yield from self._formed([entries[index] for index in order])

    def _formed(self, entries: Sequence[FrameEntry]) -> Iterator[_Planned]:
        waiting: list[FrameEntry] = []
        charge = 0
        for entry in entries:
            waiting.append(entry)
            charge += entry.charge
            if self.algorithm.makes_batch(len(waiting), charge):
                yield None, tuple(waiting)
                waiting, charge = [], 0
        if waiting:
            yield None, tuple(waiting)

    def _deliver(self, planned: _Planned, count: int) -> LogBatch:
        """count: batches of the recording up to this one."""
        started = time.perf_counter()
        frame, fragments = planned
        event = frame if frame is not None and not fragments else None
        replayed = frame if fragments else None
        loaded = self.recording.load(fragments)
        headers = [header for header, _ in loaded]
        log_batch = LogBatch(
            steps=sum(int(arrays["valid"].sum()) for _, arrays in loaded),
            # A batch that is repeated as it was consumed has the staleness that it had.
            updates=tuple(header.oldest_update for header in headers) if replayed is not None else (),
            batch=assemble(loaded, self.device) if loaded else None,
            round=replayed.round if replayed is not None and self.algorithm.lock_step else None,
            # Now: a recording does not wait for the learner.
            created_us=time.time_ns() // 1000,
            assemble_s=time.perf_counter() - started,
            reward=sum(reward_of(arrays) for _, arrays in loaded),
            recorded=count,
            event=event,
            flush=0 if replayed is None else replayed.flush,
        )
        metrics.UPDATE_SECONDS.labels("assemble").observe(log_batch.assemble_s)
        return log_batch
