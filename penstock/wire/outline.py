"""The fields of a message, walked over in its bytes: how much it unfolds to is known before it is parsed."""

from collections.abc import Iterator
from typing import Final

_MAX_VARINT: Final = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Unfit(ValueError):
    """A request that is not parsed; the message names what it holds too much of."""


def fields(data: bytes, at: int, end: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, where its tag begins, first byte and end of each string or sub-message of the message in data[at:end].

    Raises Unfit for more than `most` fields of any kind, and for bytes that are no message.
    """
    seen = 0
    while at < end:
        seen += 1
        if seen > most:
            raise Unfit(f"byte {at}: a message of more than {most} fields; send less at once")
        start = at
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at, end)
            begin, at = at, at + size
        elif kind == _VARINT:
            begin = at
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
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        if at >= end:
            raise Unfit(f"byte {at}: a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Unfit(f"byte {at}: a number has more than {_MAX_VARINT} bytes")
