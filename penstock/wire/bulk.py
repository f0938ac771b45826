"""A message with one large field of bytes, which is moved once: the message is written around it and read beside it.

A protobuf message copies its bytes when they are set, when it is written, when it is read and each time that they are
asked for. What is written here protobuf reads as the same message, and the other way round.
"""

from typing import TypeVar

from google.protobuf.message import Message

from penstock.wire.outline import fields

M = TypeVar("M", bound=Message)
_BYTES = 2


def write(message: Message, number: int, data: bytes | memoryview) -> bytes:
    """The message with `data` as its field `number`, which it does not have yet."""
    own = message.SerializeToString()
    return b"".join((own, field_head(number, len(data)), data)) if data else own


def read(kind: type[M], number: int, data: bytes) -> tuple[M, memoryview]:
    """The message without field `number`, and a view of that; raises DecodeError and Unfit for other bytes."""
    own, end, found = [], 0, memoryview(b"")
    for field, start, begin, stop in fields(data, 0, len(data), len(data)):
        if field == number:
            own.append(data[end:start])
            end, found = stop, memoryview(data)[begin:stop]
    own.append(data[end:])
    message = kind()
    message.ParseFromString(b"".join(own))
    return message, found


def field_head(number: int, size: int) -> bytes:
    """Tag and size of a field of so many bytes."""
    written = bytearray((number << 3 | _BYTES,))
    while size > 0x7F:
        written.append(size & 0x7F | 0x80)
        size >>= 7
    written.append(size)
    return bytes(written)
