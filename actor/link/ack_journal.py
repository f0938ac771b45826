"""Records for `penstock audit`: fragments acknowledged to an actor, and tokens sampled by a server.

Both are written only where `actor.ack_journal` is set: a JSON line for each event, before the event takes
effect. A line survives `kill -9`, not loss of power. So a record may lack an event that a crash interrupted,
and never holds one that did not happen.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from pydantic import TypeAdapter

from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Beginning, Fragment, beginnings, read_payload
from penstock.protocol.limits import check_id
from penstock.runtime.exit import Fatal

# ---- A file of JSON lines that a crash may tear at its end: what records for the audit are written to.


class JournalFile:
    """Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError when the file cannot be opened."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._end_torn_line()
        except OSError as error:
            raise ConfigurationError(f"actor.ack_journal={path.parent}: {error.strerror}") from error

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each, in one write; raises Fatal when the disk does not take it."""
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        if not text:
            return
        try:
            written = self._file.write(text)
        except OSError as error:
            raise Fatal(f"actor.ack_journal: {self.path}: {error.strerror}") from error
        if written != len(text):
            raise Fatal(f"actor.ack_journal: {self.path}: the disk took {written} of {len(text)} bytes")

    def close(self) -> None:
        self._file.close()

    def _end_torn_line(self) -> None:
        """A crash may have cut the last line: the next one starts behind it."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")


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


class AckJournal(JournalFile):
    """Writes the journal of one actor; `record` from the outbox's thread."""

    def __init__(self, folder: Path, run: str, actor_id: str) -> None:
        self._head = {"run": check_id("run", run), "actor": check_id("actor_id", actor_id)}
        super().__init__(folder / f"{run}.{actor_id}{_SUFFIX}")

    def record(self, fragments: Sequence[Fragment]) -> None:
        """Write a line for each, in one write; raises Fatal when the disk does not take it."""
        self.write(map(self._line, fragments))

    def _line(self, fragment: Fragment) -> dict[str, Any]:
        header = fragment.header
        return {
            **self._head,
            "session": header.session,
            "sequence": header.sequence,
            "kind": header.kind.name.lower(),
            "sha256": hashlib.sha256(fragment.payload).hexdigest(),
            "slots": beginnings(fragment),
            "weights": [(span.version, span.update) for span in header.weights],
            "steps": header.steps,
            "created_us": header.created_us,
        }


# ---- A server's own record of what it sampled, and of what it had learned from, for `penstock audit`.

_SAMPLE_SUFFIX: Final = ".sampled.jsonl"
_DIGITS: Final = 32


class Run(NamedTuple):
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


class SampleJournal(JournalFile):
    """Used by one thread."""

    def __init__(self, folder: Path, run: str, actor_id: str, server: str) -> None:
        """server: a random id, which each start of the server draws again."""
        self._head = {"run": check_id("run", run), "actor": check_id("actor_id", actor_id)}
        super().__init__(folder / f"{run}.{check_id('server', server)}{_SAMPLE_SUFFIX}")

    def sampled(self, conversation: str, version: int, answers: Iterable[Sequence[int]]) -> None:
        """Note the token ids of answers; raises Fatal when the disk does not take it."""
        self._note(conversation, [Run(version, digest(ids)) for ids in answers], "")

    def sent(self, conversation: str, fragment: Fragment) -> None:
        """Note a fragment of one slot; raises as `sampled`."""
        self._note(conversation, runs_of(fragment), hashlib.sha256(fragment.payload).hexdigest())

    def _note(self, conversation: str, runs: Sequence[Run], sha256: str) -> None:
        self.write([{**self._head, "conversation": conversation, "runs": runs, "sha256": sha256}])


def digest(ids: Sequence[int]) -> str:
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


# ---- What an audit reads of both.

T = TypeVar("T", Acknowledged, SampledLine)


def journal_files(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.glob(f"*{_SUFFIX}"))


def sample_files(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.glob(f"*{_SAMPLE_SUFFIX}"))


def is_torn(line: bytes) -> bool:
    """Return whether a line of a JSON object that cannot be read was cut by a crash; else it is damaged."""
    return not line.rstrip().endswith(b"}")


def read_journal(path: Path, damaged: list[int] | None = None) -> Iterator[Acknowledged | None]:
    """Yield what was acknowledged, in order; None for a line that a crash tore.

    damaged: gets the numbers, from 1, of other lines that cannot be read.
    """
    return _read(path, Acknowledged, damaged)


def read_samples(path: Path, damaged: list[int] | None = None) -> Iterator[SampledLine | None]:
    """Yield what was sampled and sent, as `read_journal`."""
    return _read(path, SampledLine, damaged)


def _read(path: Path, kind: type[T], damaged: list[int] | None) -> Iterator[T | None]:
    adapter = TypeAdapter(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = adapter.validate_json(line)
                bytes.fromhex(value.sha256)
                yield value
            except ValueError:
                if is_torn(line):
                    yield None
                elif damaged is not None:
                    damaged.append(number)
