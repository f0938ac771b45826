"""A frame: one record of a recording's file. Frames that a crash tore or a disk changed are recognised.

    "PSTK" · kind u8 · length of head u32 · length of body u32 · CRC-32 u32 · head · body     (little endian)

The checksum covers kind, lengths, head and body. A fragment's head is its encoded header and its body the
payload as it came; a batch's head is JSON and holds only numbers.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO, Final

from penstock.protocol.limits import MAX_MESSAGE_BYTES

_MAGIC: Final = b"PSTK"
_PREFIX: Final = struct.Struct("<4sBII")
_CHECKSUM: Final = struct.Struct("<I")
FRAME_BYTES: Final = _PREFIX.size + _CHECKSUM.size
"""Bytes of a frame beside head and body."""
MAX_PART_BYTES: Final = MAX_MESSAGE_BYTES
"""No fragment is larger than a message; a length beyond it is damage, for which no memory is allocated."""


class Kind(IntEnum):
    """The content of a frame."""

    FRAGMENT = 1
    BATCH = 2
    """The fragments since the last one were consumed as one batch."""
    EVENT = 3
    """An operator had the learner do something between two batches."""


class Torn(ValueError):
    """Reports a frame that is not whole; the message says why."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One record of a recording's file, see the module."""

    kind: Kind
    head: bytes
    body: bytes = b""

    @property
    def size(self) -> int:
        """Return the bytes of the frame in its file."""
        return FRAME_BYTES + len(self.head) + len(self.body)

    def encode(self) -> bytes:
        """Return the frame as it stands in the file."""
        prefix = _PREFIX.pack(_MAGIC, self.kind, len(self.head), len(self.body))
        return b"".join((prefix, _CHECKSUM.pack(_sum(prefix, self.head, self.body)), self.head, self.body))


def read_frame(file: BinaryIO) -> Frame | None:
    """Return the frame at the file's position; None at its end.

    Raises Torn, the position then means nothing.
    """
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
