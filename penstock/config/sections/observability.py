"""What processes tell about themselves: metrics, logs, traces."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from penstock.config.sections.section import Fraction, Section


class MetricsSection(Section):
    """Prometheus, health and trackers."""

    host: str = "127.0.0.1"
    """Address of the HTTP port with /metrics, /healthz and /readyz."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0: any free one. Under `penstock train` it is the port of the launcher."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that also get `metrics.jsonl`: tensorboard, wandb; each needs the extra of its name."""
    wandb_project: str = "penstock"
    """Project of the tracker wandb."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: into the run's folder, for `wandb sync`."""


class LogsSection(Section):
    """What every process writes to stderr."""

    format: Literal["text", "json"] = "text"
    """text: `time level role message key=value …`; json: an object a line, with role, run and all fields."""


class TracingSection(Section):
    """Where OpenTelemetry traces of fragments go; needs the extra `tracing`."""

    exporter: Literal["none", "otlp", "file"] = "none"
    """none: no traces; otlp: to a collector, OTLP over HTTP; file: a file of JSON lines for each process."""
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """URL of the collector for exporter=otlp; its headers are in OTEL_EXPORTER_OTLP_HEADERS."""
    folder: Path | None = None
    """Folder of the files of exporter=file; none: `traces` in the run's folder under `penstock train`."""
    sample_ratio: Fraction = 0.1
    """Share of the fragments that are traced; the same for every process of a run."""

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, url: str) -> str:
        """Files show it as it is."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                "write http://HOST:PORT/v1/traces or https://…, without a name or password; "
                "give those as OTEL_EXPORTER_OTLP_HEADERS"
            )
        return url
