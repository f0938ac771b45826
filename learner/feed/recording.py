"""A recording: the files of its folder, the index that is read in their place, and its writer.

    recording.json    format, the encoded run specification, its maker
    000001.frames …   the frames, in order, in files of FILE_BYTES or little more
    index.jsonl       a line per frame: its kind and where it lies

The index is written after the frames: frames that it lacks are found by reading on from its last line, so a
crash between the two loses nothing. The recording ends before the first torn frame.
"""

import base64
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TextIO

from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Fragment, header_bytes, parse_header
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.runtime.output_file import replace_file

Maker = Literal["learner", "policy"]
RecordedAction = Literal["checkpoint", "restore"]
"""An operator's command that a learner followed between two batches."""

log = logging.getLogger(__name__)


# ---- A frame: one record of a recording's file.

_MAGIC: Final = b"PSTK"
_PREFIX: Final = struct.Struct("<4sBII")
_CHECKSUM: Final = struct.Struct("<I")
FRAME_BYTES: Final = _PREFIX.size + _CHECKSUM.size
"""Bytes of a frame without head and body."""
MAX_PART_BYTES: Final = MAX_MESSAGE_BYTES
"""No fragment is larger than a message; a greater length is damage, and no memory is allocated for it."""


class Kind(IntEnum):
    """The kind of a frame."""

    FRAGMENT = 1
    BATCH = 2
    """The fragments since the last one were consumed as one batch."""
    EVENT = 3
    """A named checkpoint that the learner made or restored between two batches, as an operator asked."""


class Torn(ValueError):
    """Reports a frame that is not whole; the message says why."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One record of a recording's file: prefix, checksum, head, body."""

    kind: Kind
    head: bytes
    body: bytes = b""

    @property
    def size(self) -> int:
        return FRAME_BYTES + len(self.head) + len(self.body)

    def encode(self) -> bytes:
        prefix = _PREFIX.pack(_MAGIC, self.kind, len(self.head), len(self.body))
        return b"".join((prefix, _CHECKSUM.pack(_sum(prefix, self.head, self.body)), self.head, self.body))


def read_frame(file: BinaryIO) -> Frame | None:
    """Return the frame at the file's position, None at its end; raises Torn, then do not read on."""
    start = file.read(FRAME_BYTES)
    if not start:
        return None
    if len(start) < FRAME_BYTES:
        raise Torn(f"{len(start)} bytes where a frame begins with {FRAME_BYTES}")
    prefix, (expected,) = start[: _PREFIX.size], _CHECKSUM.unpack(start[_PREFIX.size :])
    magic, kind, head_size, body_size = _PREFIX.unpack(prefix)
    if magic != _MAGIC or kind not in tuple(Kind) or max(head_size, body_size) > MAX_PART_BYTES:
        raise Torn(f"no frame begins with {prefix.hex()}")
    head, body = file.read(head_size), file.read(body_size)
    if len(head) + len(body) < head_size + body_size:
        raise Torn(f"{len(head) + len(body)} of {head_size + body_size} bytes of a frame")
    if _sum(prefix, head, body) != expected:
        raise Torn("the checksum is not that of the bytes")
    return Frame(Kind(kind), head, body)


def _sum(*parts: bytes) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


FORMAT: Final = 1
DESCRIPTION: Final = "recording.json"
INDEX: Final = "index.jsonl"
FILE_BYTES: Final = 64 * 1024 * 1024
_BATCH_KEYS: Final = ("position", "update", "round", "fragments", "flush")
_EVENT_KEYS: Final = ("position", "update", "command", "action", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameEntry:
    """The index's entry of a frame: its place, and facts that are known without reading it.

    file, offset, size: where it lies, in bytes.   charge: T·N of a fragment.
    position: last log entry that a batch consumed; update: updates made before it; round: of lock-step;
    fragments: how many; flush: number of the command that it is a flush of, 0: none.
    command, action, name: of an event: number of the command, "checkpoint" or "restore", of which checkpoint.
    """

    kind: int
    file: int
    offset: int
    size: int
    charge: int = 0
    position: int = 0
    update: int = 0
    round: int | None = None
    fragments: int = 0
    flush: int = 0
    command: int = 0
    action: str = ""
    name: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.size


def frames_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.frames"


def entry_of(frame: Frame, file: int, offset: int) -> FrameEntry:
    """Return the entry of a frame; raises ValueError for a head that cannot be read."""
    where: dict[str, Any] = {"kind": int(frame.kind), "file": file, "offset": offset, "size": frame.size}
    if frame.kind is Kind.FRAGMENT:
        return FrameEntry(**where, charge=parse_header(frame.head).charge)
    head = json.loads(frame.head)
    known = _EVENT_KEYS if frame.kind is Kind.EVENT else _BATCH_KEYS
    return FrameEntry(**where, **{key: head[key] for key in known})


def index_line(entry: FrameEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def find_entries(folder: Path) -> list[FrameEntry]:
    """Return the entry of every whole frame: from the index as far as it is right, then by reading."""
    entries = list(_indexed(folder))
    while entries and not _is_whole(folder, entries[-1]):
        # A power cut may keep the index and lose what it names.
        entries.pop()
    file, offset = (entries[-1].file, entries[-1].end) if entries else (1, 0)
    while frames_file(folder, file).exists():
        with frames_file(folder, file).open("rb") as stream:
            stream.seek(offset)
            found, whole = _read_on(stream, file, offset)
        entries += found
        if not whole:
            break
        file, offset = file + 1, 0
    return entries


def cut(folder: Path, entries: list[FrameEntry]) -> None:
    """Remove everything after the last of `entries` from the files, and write the index again."""
    file, end = (entries[-1].file, entries[-1].end) if entries else (1, 0)
    for path in folder.glob("*.frames"):
        if path > frames_file(folder, file):
            path.unlink()
    if frames_file(folder, file).exists():
        os.truncate(frames_file(folder, file), end)
    temporary = folder / f"{INDEX}.tmp"
    temporary.write_text("".join(map(index_line, entries)))
    temporary.replace(folder / INDEX)


def _indexed(folder: Path) -> Iterator[FrameEntry]:
    try:
        lines = (folder / INDEX).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield FrameEntry(**json.loads(line))
        except (ValueError, TypeError):
            return  # torn: its frame is found by reading


def _is_whole(folder: Path, entry: FrameEntry) -> bool:
    try:
        with frames_file(folder, entry.file).open("rb") as stream:
            stream.seek(entry.offset)
            frame = read_frame(stream)
    except (OSError, Torn):
        return False
    return frame is not None and frame.size == entry.size


def _read_on(stream: Any, file: int, offset: int) -> tuple[list[FrameEntry], bool]:
    """Return the whole frames up to the end of a file, and whether the file ends with one."""
    found: list[FrameEntry] = []
    while True:
        try:
            frame = read_frame(stream)
        except Torn:
            return found, False
        if frame is None:
            return found, True
        found.append(entry_of(frame, file, offset))
        offset += frame.size


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
    def begin(
        cls, folder: Path, specification: RunSpecification, maker: Maker, max_bytes: int
    ) -> "RecordingWriter":
        """Return the writer of a new recording; raises ConfigurationError where the folder holds one."""
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
        """Return a writer that appends to the batch that ends with `position`; later records are removed.

        A recording that was full before that is not continued. command: number of the newest to keep.
        """
        entries = find_entries(folder)
        kept = _through(entries, position, command)
        cut(folder, kept)
        writer = cls(folder, kept, max_bytes)
        if (kept[-1].position if kept else 0) != position:
            log.warning(
                "the recording ended before this checkpoint and is not continued",
                extra={"folder": str(folder)},
            )
            writer.is_full = True
        return writer

    def consumed(
        self,
        fragments: Sequence[Fragment],
        *,
        position: int,
        update: int,
        of_round: int | None,
        dropped: Mapping[int, str],
        flush: int = 0,
    ) -> None:
        """Append a batch and its fragments, see `LogBatch`, unless the recording is full.

        position: last log entry. update: updates made before it. of_round: of lock-step.
        """
        head = {
            "position": position,
            "update": update,
            "round": of_round,
            "fragments": len(fragments),
            "flush": flush,
            "dropped": {str(number): reason for number, reason in dropped.items()},
        }
        frames = [_fragment_frame(fragment) for fragment in fragments]
        frames.append(Frame(Kind.BATCH, json.dumps(head).encode()))
        self._write(frames)

    def event(self, action: RecordedAction, name: str, command: int, *, position: int, update: int) -> None:
        """Append an event, see `FrameEntry`."""
        head = {"action": action, "name": name, "command": command, "position": position, "update": update}
        self._write([Frame(Kind.EVENT, json.dumps(head).encode())])

    def fragment(self, fragment: Fragment) -> bool:
        """Append a fragment that belongs to no batch; returns False once the recording is full."""
        self._write([_fragment_frame(fragment)])
        return not self.is_full

    def sync(self) -> None:
        """Write everything that was appended to the disk."""
        for file in (self._frames, self._index):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.sync()
        self._frames.close()
        self._index.close()

    def _write(self, frames: Sequence[Frame]) -> None:
        """Append frames that fit, all or none."""
        size = sum(frame.size for frame in frames)
        if not self.is_full and self._bytes + size > self._max_bytes:
            self.is_full = True
            words = {"folder": str(self._folder), "bytes": self._bytes, "max_bytes": self._max_bytes}
            log.warning("the recording is full and ends here", extra=words)
        if self.is_full:
            return
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
