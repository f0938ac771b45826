"""What a broker did with the fragments of an Append, as spans of their traces."""

from collections.abc import Iterable

from broker.log.store_records import Appended, AppendItem
from penstock.runtime import tracing


def trace_append(items: Iterable[AppendItem], appended: Appended, checked_s: float, took_s: float) -> None:
    """Record, as it ends, an Append that took so long, `checked_s` of it until its fragments were checked."""
    refusal = appended.refusal.reason.label if appended.refusal else ""
    stored_s = took_s - checked_s
    for header in (item.header for item in items):
        taken = header.sequence <= appended.acked_through
        own = tracing.record(
            "broker.append",
            took_s,
            header=header.traceparent,
            session=header.session,
            sequence=header.sequence,
            taken=taken,
            refusal="" if taken else refusal,
        )
        tracing.record("broker.check", checked_s, ago_s=stored_s, parent=own)
        tracing.record("broker.store", stored_s, parent=own)
