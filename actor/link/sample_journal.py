"""A server's own record of what it sampled, and of what it had learned from, for `penstock audit`.

    sampled   before an answer leaves: its conversation, the version that drew it, a digest of its token ids
    sent      before a fragment is queued: its conversation, a digest of its payload, and the runs in it

A run is what the payload itself says was chosen in consecutive rows under one version, so that a token that
changed after it was drawn makes a run that was never sampled. It is written only where `actor.ack_journal` is
set, one file in each life of a server, and holds digests alone: neither texts nor ids.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.actor.link.journal_file import JournalFile
from penstock.protocol.fragment import Fragment
from penstock.protocol.ids import check_id
from penstock.protocol.payload import read_payload

_SUFFIX: Final = ".sampled.jsonl"
_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class Run:
    """Choices in consecutive rows of one version. ids: their digest, hex."""

    version: int
    ids: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLine:
    """Record what was drawn, each a run, or a fragment that holds these runs. sha256: of its payload, hex."""

    run: str
    actor: str
    conversation: str
    runs: tuple[Run, ...]
    sha256: str = ""


class SampleJournal:
    """Used by one thread."""

    def __init__(self, folder: Path, run: str, actor_id: str, server: str) -> None:
        """server: drawn anew in each life of it. Raises ConfigurationError when the file cannot be opened."""
        self._head = {"run": check_id("run", run), "actor": check_id("actor_id", actor_id)}
        self._file = JournalFile(folder / f"{run}.{check_id('server', server)}{_SUFFIX}")

    def sampled(self, conversation: str, version: int, answers: Iterable[Sequence[int]]) -> None:
        """Note the token ids of answers; raises Fatal when the disk does not take it."""
        self._write(conversation, [Run(version, digest(ids)) for ids in answers], "")

    def sent(self, conversation: str, fragment: Fragment) -> None:
        """Note a fragment of one slot; raises as `sampled`."""
        self._write(conversation, runs_of(fragment), hashlib.sha256(fragment.payload).hexdigest())

    def close(self) -> None:
        """End the journal."""
        self._file.close()

    def _write(self, conversation: str, runs: Sequence[Run], sha256: str) -> None:
        pairs = [(one.version, one.ids) for one in runs]
        self._file.write([{**self._head, "conversation": conversation, "runs": pairs, "sha256": sha256}])


def digest(ids: Sequence[int]) -> str:
    """Return the digest of token ids."""
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()[:_DIGITS]


def runs_of(fragment: Fragment) -> list[Run]:
    """Return what was chosen in a fragment of one slot: consecutive valid rows of one version each."""
    tensors = read_payload(fragment.header, fragment.payload)
    valid, action = tensors["valid"][:, 0], tensors["action"][:, 0]
    version = np.zeros(len(valid), np.int64)
    for span in fragment.header.weights:
        version[span.start : span.start + span.length] = span.version
    keys = [(bool(is_valid), int(of)) for is_valid, of in zip(valid, version, strict=True)]
    return [
        Run(of, digest([int(action[row]) for row, _ in rows]))
        for (is_valid, of), rows in groupby(enumerate(keys), key=lambda one: one[1])
        if is_valid
    ]


def sample_files(folders: Iterable[Path]) -> list[Path]:
    """Return every such journal in the folders, in a fixed order."""
    return sorted(path for folder in folders for path in folder.glob(f"*{_SUFFIX}"))


def read_samples(path: Path) -> Iterator[SampledLine | None]:
    """Yield the lines of a journal in order; None for one that a crash tore."""
    with path.open("rb") as file:
        for line in file:
            yield _parse(line)


def _parse(line: bytes) -> SampledLine | None:
    try:
        value: dict[str, Any] = json.loads(line)
        runs = tuple(Run(int(version), str(ids)) for version, ids in value["runs"])
        bytes.fromhex(value["sha256"])
        return SampledLine(**{**value, "runs": runs})
    except (ValueError, TypeError, KeyError):
        return None
