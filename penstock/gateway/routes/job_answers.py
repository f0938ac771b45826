"""Answers about jobs and their dry runs, as the document describes them."""

from datetime import datetime
from typing import Any

from penstock.gateway.frame.answer import Answer
from penstock.gateway.store.tables import JobState


class NumberShown(Answer):
    """A number of a template that may be chosen. whole: it has no decimals."""

    least: float
    most: float
    default: float
    whole: bool


class TemplateShown(Answer):
    """A template. model: what it says of its model, by the names of its kind."""

    name: str
    title: str
    numbers: dict[str, NumberShown]
    model: dict[str, Any]


class TemplateList(Answer):
    """The templates of this gateway."""

    templates: list[TemplateShown]


class JobShown(Answer):
    """A job. cause: why it failed, in words. result: of a job that finished, by the names of its kind."""

    id: str
    project: str
    agent: str
    template: str
    numbers: dict[str, float]
    by: str
    state: JobState
    cause: str
    cancelled_by: str | None
    result: dict[str, Any] | None
    created: datetime
    began: datetime | None
    ended: datetime | None


class JobList(Answer):
    """The newest jobs of a project."""

    jobs: list[JobShown]


class JobCurve(Answer):
    """The curve of a run: columns of one length, oldest first."""

    updates: list[int]
    envSteps: list[int]  # noqa: N815 - as all names of the API
    meanReturn: list[float | None]  # noqa: N815


class ScoresShown(Answer):
    """Figures of scores. mean, std: null without any."""

    count: int
    mean: float | None
    std: float | None


class FreeMemory(Answer):
    """What was free before the short training. device_memory_bytes: null without a GPU."""

    memory_bytes: int
    device_memory_bytes: int | None


class DryRunShown(Answer):
    """How long a training would take, in seconds, and the peak memory of a short one, in bytes.

    preparation_seconds: are part of seconds. measured: the pace of the short training; null where it was all
    of it. scores: of what it begins with. facts: of the agent now, by the names of the template's kind: of
    one that learns from feedback, how much there is and what it says.
    """

    environment: str
    workload: str
    seed: int
    total_steps: int
    seconds: float
    preparation_seconds: float
    measured: dict[str, float] | None
    memory_bytes: int
    memory_bytes_by_role: dict[str, int]
    device_memory_bytes: int | None
    available: FreeMemory
    scores: dict[str, ScoresShown]
    facts: dict[str, Any]
