"""The actor's own record of what was acknowledged to it, for `penstock audit`.

It is written only where `actor.ack_journal` is set.

One file per actor of a run, one JSON line per fragment, written before the outbox lets the fragment go.
A line survives `kill -9` of the actor, not loss of power. The journal may lack what was acknowledged in
the moment of a crash; it never holds what was not.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.actor.link.journal_file import JournalFile
from penstock.protocol.fragment import Fragment
from penstock.protocol.ids import check_id
from penstock.protocol.slot_starts import Beginning, beginnings

_SUFFIX: Final = ".acked.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A fragment that its actor saw acknowledged.

    sha256: of the payload, hex. slots: where the experience of each begins. weights: (version, update) of
    those it was generated with, in the order of the header's spans. created_us: header's.
    """

    run: str
    actor: str
    session: int
    sequence: int
    kind: str
    sha256: str
    slots: tuple[Beginning, ...]
    weights: tuple[tuple[int, int], ...]
    steps: int
    created_us: int


class AckJournal:
    """Writes the journal of one actor; `record` from the outbox's thread."""

    def __init__(self, folder: Path, run: str, actor_id: str) -> None:
        """Raises ConfigurationError when the file cannot be opened."""
        self._run, self._actor_id = check_id("run", run), check_id("actor_id", actor_id)
        self.path = folder / f"{run}.{actor_id}{_SUFFIX}"
        self._file = JournalFile(self.path)

    def record(self, fragments: Sequence[Fragment]) -> None:
        """Write a line for each, in one write; raises Fatal when the disk does not take it."""
        self._file.write(map(self._line, fragments))

    def close(self) -> None:
        """End the journal."""
        self._file.close()

    def _line(self, fragment: Fragment) -> dict[str, Any]:
        header = fragment.header
        return {
            "run": self._run,
            "actor": self._actor_id,
            "session": header.session,
            "sequence": header.sequence,
            "kind": header.kind.name.lower(),
            "sha256": hashlib.sha256(fragment.payload).hexdigest(),
            "slots": beginnings(fragment),
            "weights": [(span.version, span.update) for span in header.weights],
            "steps": header.steps,
            "created_us": header.created_us,
        }


def journal_files(folders: Iterable[Path]) -> list[Path]:
    """Return every journal in the folders, in a fixed order."""
    return sorted(path for folder in folders for path in folder.glob(f"*{_SUFFIX}"))


def read_journal(path: Path) -> Iterator[Acknowledged | None]:
    """Yield the lines of a journal in order; None for one that a crash tore."""
    with path.open("rb") as file:
        for line in file:
            yield _parse(line)


def _parse(line: bytes) -> Acknowledged | None:
    try:
        value: dict[str, Any] = json.loads(line)
        slots = tuple((int(slot), int(episode), int(step)) for slot, episode, step in value["slots"])
        weights = tuple((int(version), int(update)) for version, update in value["weights"])
        bytes.fromhex(value["sha256"])
        return Acknowledged(**{**value, "slots": slots, "weights": weights})
    except (ValueError, TypeError, KeyError):
        return None
