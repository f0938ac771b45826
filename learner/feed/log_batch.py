"""What the feed hands to the loop: a stretch of the log in which every entry is decided."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from penstock.learner.batch import Batch
from penstock.learner.feed.recorded_event import RecordedEvent
from penstock.learner.feed.upload import in_place
from penstock.learner.ledger import Drop, Origin
from penstock.protocol.fragment import Fragment
from penstock.protocol.tensor import Array


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
    the command whose flush it is; 0: none. arrive: see `penstock.learner.feed.upload.Staged`.
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
