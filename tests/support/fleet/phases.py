"""Where the threads of a process under a fault test were, also of one that was killed."""

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.failpoint import RECORD


@dataclass(frozen=True, slots=True)
class Phase:
    """The last place that a thread reached. sequence: of what it worked on; at_ns: monotonic clock."""

    name: str
    sequence: int
    at_ns: int

    @property
    def is_idle(self) -> bool:
        return self.name.endswith(".waiting")


def read_phases(path: Path) -> list[Phase]:
    """Return one phase per thread that reached a place, newest first."""
    data = path.read_bytes()
    whole = len(data) // RECORD.size  # a process that is just starting has not given the file its size
    records = (RECORD.unpack_from(data, index * RECORD.size) for index in range(whole))
    found = [Phase(name.rstrip(b"\0").decode(), sequence, at) for name, sequence, at in records if at]
    return sorted(found, key=lambda phase: -phase.at_ns)
