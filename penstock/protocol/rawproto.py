"""Protobuf's wire format, walked and written by hand where a parser would copy or unfold too much.

A protobuf message copies its bytes when they are set, when it is written, when it is read and each time that
they are asked for, and it makes an object of every empty sub-message, two bytes on the wire. So the fields of
a request that may be hostile are walked before anything is made of them, and a large field is moved once: its
message is written around it and read beside it. What is written here protobuf reads as the same message, and
the other way round.

The format: https://protobuf.dev/programming-guides/encoding/.
"""

from collections.abc import Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_MAX_VARINT: Final = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MORE: Final = 0x80
"""Set in each byte of a number but the last."""


class Unfit(ValueError):
    """A request that is not parsed; the message names what it holds too much of."""


def fields(data: bytes, at: int, end: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each string, sub-message or bytes field of the message in data[at:end].

    Each is its number, where its tag begins, and the first byte and the end of its content, as indices of
    `data`. Fields of other kinds are passed over.
    Raises Unfit for more than `most` fields of any kind, and for bytes that are no message.
    """
    seen = 0
    while at < end:
        seen += 1
        if seen > most:
            raise Unfit(f"byte {at}: a message of more than {most} fields; send less at once")
        start = at
        # Numbers below 128 are nearly all there are: they are read without a call.
        tag = data[at]
        at += 1
        if tag & _MORE:
            tag, at = _varint(data, start, end)
        kind = tag & 7
        if kind == _BYTES:
            if at < end and data[at] < _MORE:
                begin = at + 1
                at = begin + data[at]
            else:
                size, begin = _varint(data, at, end)
                at = begin + size
        elif kind == _VARINT:
            begin = at
            if at < end and data[at] < _MORE:
                at += 1
            else:
                _, at = _varint(data, at, end)
        elif kind in (_FIXED32, _FIXED64):
            begin, at = at, at + (4 if kind == _FIXED32 else 8)
        else:
            raise Unfit(f"byte {at}: no field begins like this; check the protocol version")
        if at > end:
            raise Unfit(f"byte {begin}: a field is cut off")
        if kind == _BYTES:
            yield tag >> 3, start, begin, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        if at >= end:
            raise Unfit(f"byte {at}: a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, at
    raise Unfit(f"byte {at}: a number has more than {_MAX_VARINT} bytes")


def field_head(number: int, size: int) -> bytes:
    """Return tag and size, as they stand before the content of a field of `size` bytes; number: 1 to 15."""
    written = bytearray((number << 3 | _BYTES,))
    while size >= _MORE:
        written.append(size & 0x7F | _MORE)
        size >>= 7
    written.append(size)
    return bytes(written)


def write_around(message: Message, number: int, data: bytes | memoryview) -> bytes:
    """Return the bytes of the message with `data` as its field `number`, which it must not have yet."""
    own = message.SerializeToString()
    return b"".join((own, field_head(number, len(data)), data)) if data else own


def read_beside(kind: type[M], number: int, data: bytes) -> tuple[M, memoryview]:
    """Return the message in `data` without its field `number`, and a view of that field.

    If the field occurs several times, the last one is viewed.

    Raises Unfit and DecodeError for bytes that are no such message.
    """
    own, end, found = [], 0, memoryview(b"")
    for field, start, begin, stop in fields(data, 0, len(data), len(data)):
        if field == number:
            own.append(data[end:start])
            end, found = stop, memoryview(data)[begin:stop]
    own.append(data[end:])
    message = kind()
    message.ParseFromString(b"".join(own))
    return message, found
