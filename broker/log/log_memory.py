"""The knowledge of one learner process about its log, in case Redis is restarted without it.

Reads, renewals and writes update it; checkpoints and `reopen` read it. Thread-safe.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from penstock.broker.log.learner_records import Commit, LogEntry, LogState, Pacing

_KEPT_SEQUENCES: Final = 4096
_KEPT_COMMITS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Names the holder of the lease, its duration, and what the log was opened with."""

    run: str = ""
    name: str = ""
    ttl_ms: int = 0
    specification: bytes = b""
    pacing: Pacing | None = None


class LogMemory:
    """Holds the state known so far; its numbers only grow, except in `replace`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = LogState(run="")
        self.holder = Holder()

    @property
    def state(self) -> LogState:
        """Return a consistent copy."""
        with self._lock:
            return self._state

    def replace(self, **values: Any) -> None:
        """Set fields of the state to the given values."""
        with self._lock:
            self._state = replace(self._state, **values)

    def resume(self, state: LogState) -> None:
        """Take over the state of a checkpoint, except for run and epoch."""
        with self._lock:
            self._state = replace(state, run=self._state.run, epoch=self._state.epoch)

    def raise_to(self, **values: int) -> None:
        """Set number fields to the maximum of what is known and what is given."""
        with self._lock:
            higher = {name: max(value, getattr(self._state, name)) for name, value in values.items()}
            self._state = replace(self._state, **higher)

    def saw(self, entries: Sequence[LogEntry]) -> None:
        """Note entries that were read, in order."""
        if not entries:
            return
        with self._lock:
            sequences = dict(self._state.sequences)
            for entry in entries:
                if entry.header is not None:
                    session = entry.header.session
                    sequences[session] = max(sequences.pop(session, 0), entry.header.sequence)
            while len(sequences) > _KEPT_SEQUENCES:
                del sequences[next(iter(sequences))]
            newest = max(entries, key=lambda entry: entry.number)
            self._state = replace(
                self._state,
                sequences=sequences,
                session=max(self._state.session, max(sequences, default=0)),
                number=max(self._state.number, newest.number),
                steps_total=max(self._state.steps_total, newest.steps_total),
            )

    def committed(self, commit: Commit, trim_floor: int) -> None:
        """Note a checkpoint that counts now."""
        with self._lock:
            commits = tuple(known for known in self._state.commits if known != commit)
            self._state = replace(
                self._state,
                commits=(*commits, commit)[-_KEPT_COMMITS:],
                trim_floor=max(trim_floor, self._state.trim_floor),
            )


def to_lua(state: LogState) -> dict[str, Any]:
    """Return the state as `open_log.lua` reads it: commits as the texts that Redis keeps."""
    plain = {item.name: getattr(state, item.name) for item in fields(state) if item.type in (int, "int")}
    plain.pop("epoch")
    return {
        **plain,
        "sequences": {str(session): last for session, last in state.sequences.items()},
        "commits": [commit.encode() for commit in state.commits],
    }
