"""Answers about feedback, as the document describes them."""

from datetime import datetime
from typing import Literal

from penstock.gateway.frame.answer import Answer
from penstock.gateway.store.tables import JobState


class RatingKept(Answer):
    """A rating that is stored, under its public id."""

    id: str
    createdAt: datetime  # noqa: N815 - as callers of the service know it


class FeedbackStored(RatingKept):
    """A rating or pair of an agent that is stored."""

    agentId: str  # noqa: N815


class Stored(Answer):
    """How many were stored."""

    stored: int


class TrainedFrom(Answer):
    """A training that has read what was deleted. version: that it made, null where it made none."""

    project: str
    agent: str
    job: str
    state: JobState
    version: str | None


class Deletion(Answer):
    """What was deleted: ratings, and late rewards."""

    deleted: int
    lateRewards: int  # noqa: N815
    trainedFrom: list[TrainedFrom]  # noqa: N815


class VersionSatisfaction(Answer):
    """How content people are with a version; null: it cannot be told, or no conversation was reported."""

    version: int
    conversations: int
    rated: int
    ratingRate: float | None  # noqa: N815
    thumbsUp: int  # noqa: N815
    satisfaction: float | None
    low: float | None
    high: float | None
    verdict: Literal["told", "cannot tell"]


class SatisfactionByVersion(Answer):
    """The satisfaction with each version. leastConversations: below which it is not told."""

    leastConversations: int  # noqa: N815
    versions: list[VersionSatisfaction]
