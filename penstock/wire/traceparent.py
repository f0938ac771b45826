"""W3C trace context as a fragment's header carries it: `00-TRACE-SPAN-FLAGS` in lower-case hexadecimal.

The grammar is that of https://www.w3.org/TR/trace-context/, version 00, the only one that Penstock writes.
The broker checks it in every header, also where OpenTelemetry, an extra, is not installed, whose propagator
would pass over a bad header in silence.
"""

import re
from typing import Final, NamedTuple

_FORM: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1
_SHOWN: Final = 80


class TraceParent(NamedTuple):
    """A span, by the ids of its trace and of itself, both above 0, and whether it is recorded."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def read_traceparent(text: str) -> TraceParent:
    """Return the span that a header names; raises ValueError that names field, value and remedy."""
    found = _FORM.fullmatch(text)
    if found is not None:
        trace_id, span_id, flags = (int(part, 16) for part in found.groups())
        if trace_id and span_id:
            return TraceParent(trace_id, span_id, bool(flags & _SAMPLED))
    raise ValueError(
        f"header.traceparent={text[:_SHOWN]!r}: write 00-TRACE-SPAN-FLAGS of W3C trace context, ids not 0, "
        "or leave it out"
    )
