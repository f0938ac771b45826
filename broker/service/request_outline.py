"""How much a request unfolds to, judged from its bytes before they are parsed.

A parser makes an object of every empty sub-message, two bytes on the wire: 8 MiB of them unfold to more
than 200 MiB. So an Append, the one large request, is walked over first: what it nests is counted, and what no actor ever sends (rows of a header above 1 KiB, groups) is refused. Payloads
are stepped over, headers below `UNCOUNTED_BYTES` too: the usual Append costs some steps per fragment.
"""

from typing import Final

from penstock.v1 import experience_pb2, fragment_pb2
from penstock.wire.limits import (
    KIB,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_ROWS_PER_APPEND,
    MAX_SLOTS,
    MAX_TENSORS,
)
from penstock.wire.outline import Unfit, fields

UNCOUNTED_BYTES: Final = 2 * KIB
MAX_ROW_BYTES: Final = KIB
MAX_FIELDS: Final = 1024
"""Fields of a request or a fragment; of a header as many more as it may have rows. Walking them takes time."""
_MAX_HEADER_FIELDS: Final = 2 * MAX_SLOTS + MAX_TENSORS + MAX_FIELDS
_FRAGMENTS: Final = experience_pb2.AppendRequest.FRAGMENTS_FIELD_NUMBER
_HEADER: Final = fragment_pb2.Fragment.HEADER_FIELD_NUMBER
_ROWS: Final = {
    fragment_pb2.FragmentHeader.SLOTS_FIELD_NUMBER: ("slots", MAX_SLOTS),
    fragment_pb2.FragmentHeader.WEIGHTS_FIELD_NUMBER: ("weights", MAX_SLOTS),
    fragment_pb2.FragmentHeader.TENSORS_FIELD_NUMBER: ("tensors", MAX_TENSORS),
}


def check_outline(data: bytes) -> None:
    """Raise Unfit when the bytes of an Append would unfold to too much, or are cut off."""
    fragments = rows = 0
    for number, _, begin, end in fields(data, 0, len(data), MAX_FIELDS):
        if number != _FRAGMENTS:
            continue
        fragments += 1
        if fragments > MAX_FRAGMENTS_PER_APPEND:
            raise Unfit(f"fragments: more in one Append than {MAX_FRAGMENTS_PER_APPEND}; send less at once")
        rows += _count_rows(data, begin, end)
        if rows > MAX_ROWS_PER_APPEND:
            raise Unfit(
                f"fragments: more than {MAX_ROWS_PER_APPEND} slots, spans and tensors in one Append; "
                "send less at once"
            )


def _count_rows(data: bytes, begin: int, end: int) -> int:
    header: tuple[int, int] | None = None
    for number, _, start, stop in fields(data, begin, end, MAX_FIELDS):
        if number != _HEADER:
            continue
        if header is not None:
            # A parser merges them: many small ones would make one without bound.
            raise Unfit("fragments: a fragment with more than one header")
        header = start, stop
    if header is None or header[1] - header[0] <= UNCOUNTED_BYTES:
        return 0
    return _count_header(data, *header)


def _count_header(data: bytes, begin: int, end: int) -> int:
    counts = dict.fromkeys(_ROWS, 0)
    others = 0
    for number, _, start, stop in fields(data, begin, end, _MAX_HEADER_FIELDS):
        if number not in counts:
            others += 1
            continue
        counts[number] += 1
        name, most = _ROWS[number]
        if counts[number] > most:
            raise Unfit(f"header.{name}: more than {most}")
        if stop - start > MAX_ROW_BYTES:
            raise Unfit(f"header.{name}: a row of {stop - start} bytes, at most {MAX_ROW_BYTES}")
    return sum(counts.values()) + others
