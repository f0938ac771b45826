"""Answers about jobs and their dry runs, as the document describes them."""

from datetime import datetime
from typing import Any

from gateway.frame.answer import Answer
from gateway.store.tables import JobState


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


class Spread(Answer):
    """A figure that is estimated, between two bounds."""

    low: float
    likely: float
    high: float


class ScoresShown(Answer):
    """Figures of scores. mean, std: null without any."""

    count: int
    mean: float | None
    std: float | None


class Room(Answer):
    """What this machine has. device_memory_bytes: null without a GPU."""

    memory_bytes: int
    device_memory_bytes: int | None
    disk_bytes: int


class Calibration(Answer):
    """A short training by which the others are estimated. pace, evaluation: null where it was too short."""

    steps: int
    startup_seconds: float
    training_seconds: float
    ending_seconds: float
    pace: dict[str, Any] | None
    peak_memory_bytes: int
    disk_bytes: int
    evaluation: dict[str, Any] | None


class DryRunShown(Answer):
    """What a training would take, in seconds and bytes.

    essentials: the settings that determine most of it. fits: whether this machine has room for it. refused,
    doubtful: why not. scores: of what it begins with, and of the last calibration. facts: of the agent
    now, by the names of the template's kind: of one that learns from feedback, how much there is and what it
    says.
    """

    made: str
    configuration: str
    environment: str
    workload: str
    seed: int
    total_steps: int
    target_return: float | None
    essentials: dict[str, Any]
    seconds: Spread
    seconds_by_part: dict[str, Spread]
    seconds_per_step: Spread
    memory_bytes: Spread
    memory_bytes_by_role: dict[str, int]
    device_memory_bytes: Spread | None
    disk_bytes: Spread
    disk_bytes_by_name: dict[str, Spread]
    available: Room
    fits: bool
    refused: list[str]
    doubtful: list[str]
    scores: dict[str, ScoresShown]
    calibrations: list[Calibration]
    facts: dict[str, Any]
