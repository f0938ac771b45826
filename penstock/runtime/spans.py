"""The OpenTelemetry side of `penstock.runtime.tracing`: imported only where traces are recorded.

Spans leave from a thread of the SDK, in batches; beyond its bounded queue they are dropped, with a warning.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)

from penstock.config.settings import TracingSection
from penstock.wire.traceparent import TraceParent, read_traceparent

_NS: Final = 1_000_000_000
_PREFIX: Final = "penstock."


class Spans:
    """Records the spans of one process."""

    def __init__(self, section: TracingSection, role: str, run: str) -> None:
        about = {
            "service.name": f"penstock-{role}",
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        ratio = TraceIdRatioBased(section.sample_ratio)
        self._provider = TracerProvider(
            # A fragment's context came over the wire: its flag may ask, the own ratio decides. All processes
            # with the same ratio take the same traces.
            sampler=ParentBased(root=_Roots(ratio), remote_parent_sampled=ratio),
            resource=Resource.create(about | ({f"{_PREFIX}run": run} if run else {})),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(section, role)))
        self._tracer = self._provider.get_tracer("penstock")

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    @contextmanager
    def trace(self, name: str) -> Iterator[None]:
        """Open a span as `tracing.trace` does."""
        with self._tracer.start_as_current_span(name, context=Context()):
            yield

    def current(self) -> str:
        """Return the header of the current span, as `tracing.current` does."""
        return _traceparent(trace.get_current_span())

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the current span, as `tracing.describe` does."""
        trace.get_current_span().set_attributes(_prefixed(attributes))

    def record(
        self,
        name: str,
        took_s: float,
        *,
        ago_s: float,
        header: str,
        parent: str,
        links: Sequence[str],
        attributes: Mapping[str, Any],
    ) -> str:
        """Record a span that has ended, as `tracing.record` does."""
        end_ns = time.time_ns() - round(ago_s * _NS)
        span = self._tracer.start_span(
            name,
            context=_context(header or parent, is_remote=bool(header)),
            links=[trace.Link(_span_context(link, is_remote=False)) for link in links],
            attributes=_prefixed(attributes),
            start_time=end_ns - round(took_s * _NS),
        )
        span.end(end_ns)
        return _traceparent(span)


class _Roots(Sampler):
    """Samples first spans: always those with links, because what they link to was sampled.

    Others by `ratio`.
    """

    def __init__(self, ratio: Sampler) -> None:
        self._ratio = ratio

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Any = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        """Answer the SDK whether a span is sampled."""
        sampler = ALWAYS_ON if links else self._ratio
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Return the name of the sampler for the SDK's messages."""
        return f"links, else {self._ratio.get_description()}"


def _exporter(section: TracingSection, role: str) -> SpanExporter:
    if section.exporter == "otlp":
        return OTLPSpanExporter(endpoint=section.endpoint)
    assert section.folder is not None  # `tracing.start` has looked
    section.folder.mkdir(parents=True, exist_ok=True)
    file = (section.folder / f"{role}-{os.getpid()}.jsonl").open("a")
    return ConsoleSpanExporter(out=file, formatter=_line)


def _line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


def _context(traceparent: str, *, is_remote: bool) -> Context:
    if not traceparent:
        return Context()
    span = trace.NonRecordingSpan(_span_context(traceparent, is_remote=is_remote))
    return trace.set_span_in_context(span, Context())


def _span_context(traceparent: str, *, is_remote: bool) -> trace.SpanContext:
    read = read_traceparent(traceparent)
    return trace.SpanContext(read.trace_id, read.span_id, is_remote, trace.TraceFlags(read.sampled))


def _traceparent(span: trace.Span) -> str:
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return ""
    return str(TraceParent(context.trace_id, context.span_id, sampled=True))


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}{name}": value for name, value in attributes.items()}
