"""Answers about trainings and policies, as the document describes them, in the service's own names."""

from datetime import datetime
from typing import Any, Literal

from penstock.gateway.surface import Answer, JobState


class TrainedPolicy(Answer):
    """A training that has finished. trainingSteps: updates that were done.

    rewardMean, rewardStd: of answers to prompts that were held out, by the reward model; null: none were.
    """

    status: Literal["trained"]
    policyId: str  # noqa: N815 - as callers of the service know it
    version: str
    modelPath: str  # noqa: N815
    rewardModelPath: str  # noqa: N815
    feedbackCount: int  # noqa: N815
    trainingSteps: int | None  # noqa: N815
    rewardMean: float | None  # noqa: N815
    rewardStd: float | None  # noqa: N815


class TrainingEstimate(Answer):
    """What a training would take, and what its feedback says. scoreMean, scoreStd: null for pairs alone."""

    dry_run: Literal[True]
    feedbackCount: int  # noqa: N815
    estimatedSteps: int  # noqa: N815
    estimatedTimeMinutes: float  # noqa: N815
    scoreMean: float | None  # noqa: N815
    scoreStd: float | None  # noqa: N815
    modelConfig: dict[str, Any]  # noqa: N815


class TrainingGoesOn(Answer):
    """A training that has not ended. job: the address at which it is asked after."""

    status: JobState
    policyId: str  # noqa: N815
    job: str


class PolicyMetrics(Answer):
    """What the reward model says of a policy's answers to prompts that were held out."""

    rewardMean: float | None  # noqa: N815
    rewardStd: float | None  # noqa: N815


class Policy(Answer):
    """A trained version of an agent."""

    id: str
    agentId: str  # noqa: N815
    version: str
    modelPath: str  # noqa: N815
    rewardModelPath: str  # noqa: N815
    feedbackCount: int  # noqa: N815
    metrics: PolicyMetrics
    createdAt: datetime  # noqa: N815
