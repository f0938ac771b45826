"""The way of a fragment as spans of OpenTelemetry; off unless `tracing.exporter` says where they go.

    actor.unroll ─┬─ actor.apply      new weights, where there were some
                  ├─ actor.append     until the broker's answer
                  ├─ broker.append ─┬─ broker.check
                  │                 └─ broker.store
                  └─ learner.batch
                        ▲ link
    learner.update ── learner.publish

A fragment's header carries the context of its `actor.unroll`: all that happens to the fragment later is a
child of that span. An update has many fragments, so it is a trace of its own with a link to each one's
`learner.batch`. While it is off nothing of OpenTelemetry is imported here, no header has a context, and each
call here is one look: the no-op tracer of opentelemetry-api takes 6 µs for a block where this takes 0.3, and
35 ms of CPU to import.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from penstock.config.extras import how_to_install
from penstock.config.settings import ConfigurationError, Settings, TracingSection
from penstock.rpc.address import is_local

if TYPE_CHECKING:
    from penstock.runtime.spans import Spans

Attribute = str | int | float | bool

CLOSE_S: Final = 3.0
"""What the last spans have to leave when a process ends."""
_OFF: Final = nullcontext()
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_spans: "Spans | None" = None


def start(settings: Settings, role: str) -> None:
    """Record from now on, where the settings say so.

    Raises ConfigurationError when the extra is not installed, or what is set cannot be used.
    """
    global _spans
    section = settings.tracing
    if section.exporter == "none":
        return
    _check(section, insecure=settings.security.insecure)
    try:
        from penstock.runtime.spans import Spans  # noqa: PLC0415 - only where it is wanted
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"tracing.exporter={section.exporter!r}: {error.name} is not installed; "
            f"{how_to_install('tracing')}, or leave it out"
        ) from error
    _spans = Spans(section, role, settings.run)


def end() -> None:
    """Send what is left, for CLOSE_S at most, and record no more."""
    global _spans
    spans, _spans = _spans, None
    if spans is not None:
        closing = Thread(target=spans.close, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def is_on() -> bool:
    """Return whether this process records; ask before working out what to record."""
    return _spans is not None


def trace(name: str) -> AbstractContextManager[None]:
    """Return a context whose block is the first span of a new trace, when it is sampled."""
    return _OFF if _spans is None else _spans.trace(name)


def current() -> str:
    """Return the traceparent of the block that this thread is in; "" outside, and when it is not sampled."""
    return "" if _spans is None else _spans.current()


def describe(**attributes: Attribute) -> None:
    """Say more of that block."""
    if _spans is not None:
        _spans.describe(attributes)


def record(
    name: str,
    took_s: float,
    *,
    ago_s: float = 0.0,
    header: str = "",
    parent: str = "",
    links: Sequence[str] = (),
    **attributes: Attribute,
) -> str:
    """Add a span that took so long and ended `ago_s` before now; its traceparent, "" when it is not sampled.

    header: the traceparent of a fragment's header, checked; it came from elsewhere, so the span is kept only
    if this process's own `tracing.sample_ratio` takes its trace. parent, links: what was returned here
    before. With none of the three there is nothing to record.
    """
    if _spans is None or not (header or parent or links):
        return ""
    return _spans.record(
        name, took_s, ago_s=ago_s, header=header, parent=parent, links=links, attributes=attributes
    )


def _check(section: TracingSection, *, insecure: bool) -> None:
    if section.exporter == "file" and section.folder is None:
        raise ConfigurationError("tracing.folder: name the folder that tracing.exporter='file' writes to")
    url = urlsplit(section.endpoint)
    address = f"{url.hostname}:{url.port or _DEFAULT_PORTS[url.scheme]}"
    if section.exporter == "otlp" and url.scheme == "http" and not insecure and not is_local(address):
        raise ConfigurationError(
            f"tracing.endpoint={section.endpoint!r}: plaintext beyond loopback; use https, a collector on "
            "this machine, or set security.insecure"
        )
