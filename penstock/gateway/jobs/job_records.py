"""A job as its callers see it, what a template lets them choose, and what a job that ended left."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.gateway.accounts.account_errors import BadInput
from penstock.gateway.store.tables import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training that somebody asked for; the fields are those of `JobRow`."""

    id: str
    project: str
    agent: str
    template: str
    numbers: Mapping[str, float]
    facts: Mapping[str, Any]
    by: str
    state: JobState
    cause: str
    place: str
    cancelled_by: str | None
    result: Mapping[str, Any] | None
    created: datetime
    began: datetime | None
    ended: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of a template that callers may choose, between `least` and `most`.

    whole: it has no decimals. settings: `SECTION.KEY` of the run, and how many times the number each one is.
    """

    settings: Mapping[str, float]
    least: float
    most: float
    default: float
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A configuration that the operator offers, and the numbers in it that callers may choose.

    kind: of the jobs made from it, as a workload calls it; "": a plain training. model: what is shown of the
    configuration.
    """

    name: str
    title: str
    numbers: Mapping[str, Number]
    kind: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)

    def chosen(self, said: Mapping[str, float]) -> dict[str, float]:
        """Return all numbers, those that were not said by default; raises BadInput for one out of bounds."""
        unknown = said.keys() - self.numbers.keys()
        if unknown:
            known = ", ".join(self.numbers) or "none"
            raise BadInput("numbers", f"this template has no such number; its numbers are: {known}")
        return {name: _checked(name, one, said.get(name)) for name, one in self.numbers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Says how a job that began has ended. summary: the run's, None where it left none."""

    state: JobState
    cause: str = ""
    summary: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedVersion:
    """A policy that a job trained, and where it lies.

    version: its label, once for an agent. reward_mean, reward_std: of its answers to prompts that were held
    out, by the reward model; None where there is no such figure.
    """

    version: str
    model_path: str
    reward_model_path: str
    feedback_count: int
    reward_mean: float | None
    reward_std: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What a finished job came to. result: as its callers see it. version: that its agent has from now on."""

    result: Mapping[str, Any]
    version: TrainedVersion | None = None


def shown(job: Job) -> dict[str, Any]:
    """Return a job as its callers see it."""
    hidden = {"place", "facts"}
    return {name: getattr(job, name) for name in Job.__dataclass_fields__ if name not in hidden}


def _checked(name: str, number: Number, said: float | None) -> float:
    value = number.default if said is None else said
    if not number.least <= value <= number.most:
        raise BadInput(name, f"use a number from {number.least:g} to {number.most:g}")
    if number.whole and value != int(value):
        raise BadInput(name, "use a whole number")
    return int(value) if number.whole else value
