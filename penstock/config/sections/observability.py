"""What processes tell about themselves: metrics and logs."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.sections.section import Section


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
