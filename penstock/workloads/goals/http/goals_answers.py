"""Answers about injectors, as the document describes them. Times are Unix time in seconds."""

from typing import Literal

from penstock.gateway.surface import Answer


class RulesShown(Answer):
    """The rules that an injector keeps. quiet: hours of the day in which it carries nothing out."""

    threshold: float
    explore: float
    interval_s: float
    daily_limit: int
    veto_s: float
    quiet: list[str]


class InjectorListed(Answer):
    """An injector. stopped: why it carries nothing out any more. version: of the policy that it asks."""

    name: str
    state: Literal["running", "silent", "stopped", "ended"]
    seen: float | None
    auto: bool
    stopped: str | None
    trouble: str
    version: int | None
    rules: RulesShown | None


class InjectorList(Answer):
    """The injectors of a project."""

    injectors: list[InjectorListed]


class LastDay(Answer):
    """What an injector did in the last day. held: goals that were held back, by why."""

    proposed: int
    injected: int
    succeeded: int
    failed: int
    held: dict[str, int]
    perHour: float  # noqa: N815 - as all names of the API


class SuccessShown(Answer):
    """The share of the last goals that succeeded; null: none was told of."""

    of: int
    share: float | None


class ReliabilityShown(Answer):
    """How well the probabilities fit what happened. gap: between probability and rate, on average."""

    brier: float
    gap: float
    outcomes: int


class GoalShown(Answer):
    """A goal. learned: whether its reward was taken for training; null: it has none yet."""

    goal_id: str
    goal: str
    timestamp: float
    reasoning: str
    priority: float
    confidence: float
    expected_reward: float | None
    outcome: str
    held: str | None
    learned: bool | None
    vetoed: bool
    mayVeto: bool  # noqa: N815


class InjectorShown(InjectorListed):
    """An injector with what it did. confidence: how many goals of the day, in ten equal parts of 0 to 1."""

    day: LastDay
    success: SuccessShown
    confidence: list[int]
    reliability: ReliabilityShown | None
    goals: list[GoalShown]
