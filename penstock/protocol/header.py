"""Fragment header: everything about a fragment but its bytes, as immutable values.

Field meanings are in `protos/penstock/v1/fragment.proto`. Nothing here is checked on construction:
`penstock.protocol.conformance` holds a header against the run's schema before it is stored.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a fragment may be used for."""

    TRAIN = 1
    SHADOW = 2


class Slot(NamedTuple):
    """Tells where one column comes from: environment, episode and index of its first step."""

    slot_id: int
    episode_id: int
    first_step: int


class WeightSpan(NamedTuple):
    """Rows [start, start + length) of a slot were generated with (version, update)."""

    slot: int
    start: int
    length: int
    version: int
    update: int


class TensorEntry(NamedTuple):
    """Where a tensor lies in the payload and how; sizes and offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    stored_size: int
    raw_size: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHeader:
    """Description of T = `steps` steps of N = len(`slots`) slots."""

    run: str
    session: int
    sequence: int
    schema_id: str
    steps: int
    slots: tuple[Slot, ...]
    weights: tuple[WeightSpan, ...]
    tensors: tuple[TensorEntry, ...]
    policy: str = "default"
    kind: Kind = Kind.TRAIN
    created_us: int = 0
    round: int = 0
    group_id: str = ""
    attributes: bytes = b""

    @property
    def charge(self) -> int:
        """T·N, valid or not: what the fragment counts in every budget, in steps."""
        return self.steps * len(self.slots)

    @property
    def oldest_update(self) -> int:
        """Update count of the oldest weights it was generated with: what its staleness counts from."""
        return min(span.update for span in self.weights)

    @property
    def oldest_version(self) -> int:
        """Oldest weight version it was generated with."""
        return min(span.version for span in self.weights)

    @property
    def newest_version(self) -> int:
        """Newest weight version it was generated with."""
        return max(span.version for span in self.weights)
