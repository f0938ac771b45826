"""Writes a recording: append-only, whole frames, a bound on its bytes.

`consumed` writes the batch that the loop has just consumed, `sync` makes it survive loss of power. `sync` is
called before a checkpoint is committed, so that a learner that resumes finds everything up to its position
and cuts off the rest, which it will consume again. At the bound the recording ends, with a batch, and
learning goes on.
"""

import base64
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from penstock.config.settings import ConfigurationError, LearnerSection
from penstock.learner.feed.recorded_event import RecordedEvent
from penstock.learner.recording.recording_index import (
    DESCRIPTION,
    FILE_BYTES,
    FORMAT,
    INDEX,
    Frame,
    FrameEntry,
    Kind,
    cut,
    entry_of,
    find_entries,
    frames_file,
    index_line,
)
from penstock.protocol.fragment import Fragment, header_bytes
from penstock.protocol.specification import RunSpecification
from penstock.registry.weight_files import replace_file
from penstock.runtime import metrics

Maker = Literal["learner", "policy"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One delivery of the feed.

    position: last log entry. update: updates made before it. dropped: number → reason.
    flush: number of the command that it is a flush of; 0: none.
    """

    position: int
    update: int
    round: int | None
    dropped: dict[int, str]
    fragments: Sequence[Fragment]
    flush: int = 0


class RecordingWriter:
    """Writes a recording; used by one thread. Make one with `begin` or `go_on`."""

    def __init__(
        self, folder: Path, entries: list[FrameEntry], max_bytes: int, file_bytes: int = FILE_BYTES
    ) -> None:
        self._folder = folder
        self._max_bytes, self._file_bytes = max_bytes, file_bytes
        self._bytes = sum(entry.size for entry in entries)
        self._number = entries[-1].file if entries else 1
        self._frames: BinaryIO = frames_file(folder, self._number).open("ab")
        self._index: TextIO = (folder / INDEX).open("a")
        self.is_full = False

    @classmethod
    def of_run(
        cls,
        section: LearnerSection,
        specification: RunSpecification,
        resumed_at: int | None,
        command: int = 0,
    ) -> "RecordingWriter | None":
        """Return the writer that `learner.record` asks for; None where it asks for none.

        section: names the folder and its size. specification: of the run, which the recording repeats.
        resumed_at: position of the checkpoint that the run is resumed from, where its recording goes on;
        None for a run that begins. command: number of the newest that the checkpoint contains. Raises
        ConfigurationError as `begin` does.
        """
        if section.record is None:
            return None
        if resumed_at is not None and (section.record / DESCRIPTION).exists():
            return cls.go_on(section.record, resumed_at, section.record_max_bytes, command)
        return cls.begin(section.record, specification, "learner", section.record_max_bytes)

    @classmethod
    def begin(
        cls, folder: Path, specification: RunSpecification, maker: Maker, max_bytes: int
    ) -> "RecordingWriter":
        """Return the writer of a new recording; raises ConfigurationError where the folder holds one.

        Args:
            folder: folder of the recording.
            specification: of the run.
            maker: who makes it: a learner or a policy.
            max_bytes: bound at which the recording ends.
        """
        if (folder / DESCRIPTION).exists():
            raise ConfigurationError(f"{folder}: holds a recording already; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        encoded = base64.b64encode(specification.encode()).decode()
        description = {
            "format": FORMAT, "made_by": maker, "run": specification.run, "specification": encoded,
        }  # fmt: skip
        replace_file(folder / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())
        return cls(folder, [], max_bytes)

    @classmethod
    def go_on(cls, folder: Path, position: int, max_bytes: int, command: int = 0) -> "RecordingWriter":
        """Return a writer behind the batch that ends with `position`; later records are cut off.

        A recording that ended before (it was full) stays as it is. folder: of the recording. max_bytes: bound
        at which it ends. command: number of the newest whose event stays.
        """
        entries = find_entries(folder)
        kept = _through(entries, position, command)
        cut(folder, kept)
        writer = cls(folder, kept, max_bytes)
        if (kept[-1].position if kept else 0) != position:
            log.warning(
                "the recording ended before this checkpoint and stays so", extra={"folder": str(folder)}
            )
            writer.is_full = True
        return writer

    def consumed(self, consumed: Consumed) -> None:
        """Append a delivery's fragments and the batch that they are; nothing once the recording is full."""
        frames = [_fragment_frame(fragment) for fragment in consumed.fragments]
        frames.append(_batch_frame(consumed))
        if self._fits(frames):
            self._write(frames)

    def event(self, event: RecordedEvent, position: int, update: int) -> None:
        """Append what an operator had the learner do; nothing once the recording is full.

        position: last log entry consumed before it. update: updates made before it.
        """
        head = {**asdict(event), "position": position, "update": update}
        frame = Frame(Kind.EVENT, json.dumps(head).encode())
        if self._fits([frame]):
            self._write([frame])

    def fragment(self, fragment: Fragment) -> bool:
        """Append a fragment that belongs to no batch; False once the recording is full."""
        frame = _fragment_frame(fragment)
        if self._fits([frame]):
            self._write([frame])
        return not self.is_full

    def sync(self) -> None:
        """Make everything that was appended survive loss of power."""
        for file in (self._frames, self._index):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Sync and close the files."""
        self.sync()
        self._frames.close()
        self._index.close()

    def _fits(self, frames: Sequence[Frame]) -> bool:
        size = sum(frame.size for frame in frames)
        if not self.is_full and self._bytes + size > self._max_bytes:
            self.is_full = True
            words = {"folder": str(self._folder), "bytes": self._bytes, "max_bytes": self._max_bytes}
            log.warning("the recording is full and ends here", extra=words)
        return not self.is_full

    def _write(self, frames: Sequence[Frame]) -> None:
        if self._frames.tell() >= self._file_bytes:
            self._next_file()
        offset = self._frames.tell()
        for frame in frames:
            self._frames.write(frame.encode())
            self._index.write(index_line(entry_of(frame, self._number, offset)))
            offset += frame.size
            self._bytes += frame.size
            metrics.RECORDED_BYTES.inc(frame.size)
        self._frames.flush()
        self._index.flush()
        metrics.RECORDED_FRAGMENTS.inc(sum(frame.kind is Kind.FRAGMENT for frame in frames))

    def _next_file(self) -> None:
        self.sync()
        self._frames.close()
        self._number += 1
        self._frames = frames_file(self._folder, self._number).open("ab")


def _through(entries: list[FrameEntry], position: int, command: int) -> list[FrameEntry]:
    """Return the entries up to the last batch that ends at or before `position`, and events up to one."""
    count = 0
    for index, entry in enumerate(entries, 1):
        is_event = entry.kind == Kind.EVENT and entry.command <= command
        if (is_event or entry.kind == Kind.BATCH) and entry.position <= position:
            count = index
    return entries[:count]


def _fragment_frame(fragment: Fragment) -> Frame:
    return Frame(Kind.FRAGMENT, header_bytes(fragment.header), bytes(fragment.payload))


def _batch_frame(consumed: Consumed) -> Frame:
    head = {
        "position": consumed.position,
        "update": consumed.update,
        "round": consumed.round,
        "fragments": len(consumed.fragments),
        "flush": consumed.flush,
        "dropped": {str(number): reason for number, reason in consumed.dropped.items()},
    }
    return Frame(Kind.BATCH, json.dumps(head).encode())
