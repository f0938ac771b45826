"""Where the loop's batches come from.

They come from the log (`penstock.learner.feed.log_feed`) or a recording
(`penstock.learner.recording.recorded_feed`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from penstock.learner.batch import Batch
from penstock.learner.feed.recorded_event import RecordedEvent
from penstock.learner.ledger import Drop, Origin
from penstock.protocol.fragment import Fragment
from penstock.protocol.tensor import Array

# ---- How batches reach the device: on a CPU they are there; to a GPU they are copied while it computes.


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch that may still be on its way. arrive: call it in the thread that uses the batch, before."""

    batch: Batch
    arrive: Callable[[], None]


class Upload(Protocol):
    """`stage` from one thread."""

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        ...

    def stage(self, assemble: Callable[[], Batch]) -> Staged:
        """Have a batch assembled for the device."""
        ...


class InPlace:
    """For the CPU: a batch is where it is used."""

    device = torch.device("cpu")

    def stage(self, assemble: Callable[[], Batch]) -> Staged:
        """Return the batch as it was assembled."""
        return Staged(assemble(), in_place)


class SideStream:
    """For a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def stage(self, assemble: Callable[[], Batch]) -> Staged:
        """Return the batch in pinned memory, with its copies to the device under way."""
        with torch.cuda.stream(self._stream):
            batch = assemble()
            copied = self._stream.record_event()

        def arrive() -> None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in tensors(batch):
                tensor.record_stream(current)

        return Staged(batch, arrive)


def upload_to(device: torch.device) -> Upload:
    """Return how batches get there."""
    return SideStream(device) if device.type == "cuda" else InPlace()


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from value.values()


def in_place() -> None:
    """Do nothing: what is there need not arrive."""


# ---- What the feed hands to the loop: a stretch of the log in which every entry is decided.


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBatch:
    """Entries up to `last`, all of them decided.

    trained: numbers in `batch`, in its order; with several ranks the batch of this one is a part of it.
    dropped: number → reason. steps: valid ones of the batch. updates, versions: oldest of each fragment.
    batch: None when everything was dropped. round: of lock-step. size: bytes that the log holds of them.
    created_us: oldest creation time, 0 without a fragment. assemble_s: seconds that putting it together took.
    origins: number → who sent it, of trained and dropped. reward: sum over the batch's steps. fragments: of
    the batch as they came, where the learner records. recorded: batches of a recording up to this one, which
    the next checkpoint notes; 0 from the log. event: of a recording, in place of a batch. flush: number of
    the command whose flush it is; 0: none. arrive: see `penstock.learner.feed.source.Staged`.
    """

    last: int
    trained: tuple[int, ...]
    dropped: Mapping[int, Drop]
    steps: int
    updates: tuple[int, ...]
    versions: tuple[int, ...]
    batch: Batch | None
    round: int | None
    size: int
    created_us: int
    assemble_s: float
    origins: Mapping[int, Origin]
    reward: float = 0.0
    fragments: tuple[Fragment, ...] = ()
    recorded: int = 0
    event: RecordedEvent | None = None
    flush: int = 0
    arrive: Callable[[], None] = in_place

    @property
    def sessions(self) -> set[int]:
        """Return who sent what the batch is of; nothing of a recording, whose senders are not known."""
        found = (self.origins.get(number) for number in self.trained)
        return {origin.session for origin in found if origin is not None}

    def as_dropped(self, reason: Drop) -> Self:
        """Return the same entries without a batch: all that was to be trained is dropped."""
        dropped = {**self.dropped, **dict.fromkeys(self.trained, reason)}
        return replace(self, trained=(), dropped=dropped, steps=0, batch=None, fragments=(), reward=0.0)


def reward_of(arrays: Mapping[str, Array]) -> float:
    """Return the sum of a fragment's rewards, float32 [T, N], over its valid steps."""
    return float(arrays["reward"].sum(where=arrays["valid"].astype(bool), dtype=float))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """What is pending up to an entry, as one batch. number: of the command. least: fewest steps."""

    number: int
    least: int
    through: int


class FeedEnded(Exception):
    """Everything that a feed holds was taken; raised by `Feed.take`."""


class Feed(Protocol):
    """Batches in the one order in which they are learned. `run` fills a bounded queue, `take` empties it."""

    def run(self) -> None:
        """Read ahead in a thread until the process ends or the source does."""
        ...

    def take(self, timeout_s: float) -> LogBatch | None:
        """Return the next batch, called by the loop; None when there is none within `timeout_s` seconds.

        Raises FeedEnded, at this and every later call, where the source has an end and it is reached.
        """
        ...

    def drop_before(self, version: int) -> None:
        """Drop experience that was begun with an older version, as `restored`, where it is not taken yet."""
        ...

    def flush(self, flush: Flush) -> None:
        """Take what is pending up to an entry as the batch behind the whole ones there; see `too_few`.

        Raises NotImplementedError where there is no log.
        """
        ...

    def too_few(self, number: int) -> int | None:
        """Steps that were pending where a flush asks for more; None: it is taken, or will be."""
        ...

    def skipped(self) -> None:
        """Note that the batch taken last made no update.

        The batches behind it have their turn one update earlier.
        """
        ...


@dataclass(slots=True, kw_only=True)
class FeedPosition:
    """How far the loop has consumed its feed, beside the ledger's log entries.

    A checkpoint holds both figures.

    round: next of lock-step. recorded: batches and events of a recording consumed so far.
    restored_from: oldest version whose experience is learned from; 0: any.
    """

    round: int = 0
    recorded: int = 0
    restored_from: int = 0

    def is_before_restore(self, log_batch: LogBatch) -> bool:
        """Return whether a batch that was read ahead holds experience from before a restore."""
        return any(version < self.restored_from for version in log_batch.versions)

    def advance(self, log_batch: LogBatch) -> None:
        """Move behind a batch that was consumed."""
        if log_batch.round is not None:
            self.round = log_batch.round + 1
        self.recorded = log_batch.recorded
