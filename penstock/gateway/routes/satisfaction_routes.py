"""Satisfaction with each version of an agent, over all its conversations, rated or not.

People who rate have stronger opinions than others. Therefore a version is judged by the share of thumbs-up
among all its conversations, together with the share that was rated, and not below LEAST conversations.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit
from penstock.gateway.frame.requests import NUMERIC, Answer, Body, Text, example
from penstock.gateway.frame.route_access import GuardedRoute, Member, parts_of
from penstock.gateway.routes.feedback_routes import AgentId, Stored
from penstock.gateway.store.tables import ConversationRow, ProjectUsageRow
from penstock.registry.canary import wilson_interval
from penstock.registry.ratings import Tally

LEAST: Final = 30
"""Fewest conversations by which a version is judged."""
THUMB: Final = 0.5
"""A score above it is a thumb up."""


class VersionSatisfaction(Answer):
    """The satisfaction with a version; null: unknown, or no conversation was reported."""

    version: int
    conversations: int
    rated: int
    ratingRate: float | None  # noqa: N815
    thumbsUp: int  # noqa: N815
    satisfaction: float | None
    low: float | None
    high: float | None
    verdict: Literal["told", "cannot tell"]


def satisfaction(reported: Mapping[int, int], tallies: Sequence[Tally]) -> list[VersionSatisfaction]:
    """Return the satisfaction with each version, newest first.

    reported: number of conversations by version, of versions for which they were reported.
    """
    rated = {one.version: one for one in tallies}
    return [
        _judged(
            version, reported.get(version, 0), rated.get(version, Tally(version=version, rated=0, well=0))
        )
        for version in sorted(reported.keys() | rated.keys(), reverse=True)
    ]


def share_of(count: int, of: int) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return a share and its 95 % interval (Wilson); None each below LEAST."""
    return (None, None, None) if of < LEAST else (count / of, *wilson_interval(count, of))


def note(session: Session, project: str, agent: str, version: int, conversations: Sequence[str]) -> int:
    """Store conversations of a version, each once; returns the number of new ones."""
    row = ConversationRow
    own = (row.project == project) & (row.agent == agent) & (row.version == version)
    names = set(conversations)
    new = names - set(session.scalars(select(row.conversation).where(own & row.conversation.in_(names))))
    session.add_all(
        row(project=project, agent=agent, version=version, conversation=name) for name in sorted(new)
    )
    return len(new)


def reported_before(session: Session, project: str, more: int) -> int:
    """Count `more` conversations of a project, and return how many were reported before."""
    usage = session.get(ProjectUsageRow, project)
    if usage is None:
        usage = ProjectUsageRow(project=project, conversations=0)
        session.add(usage)
    before, usage.conversations = usage.conversations, usage.conversations + more
    return before


def counts(session: Session, project: str, agent: str) -> dict[int, int]:
    row = ConversationRow
    counted = select(row.version, func.count()).where((row.project == project) & (row.agent == agent))
    return dict(session.execute(counted.group_by(row.version)).all())


def _judged(version: int, reported: int, tally: Tally) -> VersionSatisfaction:
    every = max(reported, tally.rated) if reported else 0
    share, low, high = share_of(tally.well, every)
    return VersionSatisfaction(
        version=version,
        conversations=every,
        rated=tally.rated,
        ratingRate=tally.rated / every if every else None,
        thumbsUp=tally.well,
        satisfaction=share,
        low=low,
        high=high,
        verdict="cannot tell" if share is None else "told",
    )


router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_CONVERSATIONS: Final = 1000

Conversation = Annotated[Text, Field(min_length=1, max_length=128)]


class SatisfactionByVersion(Answer):
    """The satisfaction with each version. leastConversations: fewest by which one is judged."""

    leastConversations: int  # noqa: N815
    versions: list[VersionSatisfaction]


class Conversations(Body):
    """Conversations of a version of an agent; each counts once, however often it is reported."""

    model_config = example(version=15, conversations=["talk-1", "talk-2"])

    version: Annotated[int, Field(ge=1, lt=2**63), NUMERIC]
    conversations: Annotated[list[Conversation], Field(min_length=1, max_length=MAX_CONVERSATIONS)]


@router.post(
    "/api/projects/{project}/agents/{agent_id}/conversations", status_code=201, response_model=Stored
)
def tell(request: Request, member: Member, agent_id: AgentId, body: Conversations) -> dict[str, int]:
    """Report conversations of a version, rated or not."""
    name, by, quotas = member.project, member.principal.subject, parts_of(request).quotas

    def store(session: Session, now: datetime) -> int:
        stored = note(session, name, agent_id, body.version, body.conversations)
        if stored:
            quotas.check("conversations", reported_before(session, name, stored), stored)
            facts = {"version": body.version, "conversations": stored}
            audit.note(
                session, now, by=by, action="conversations told", project=name, subject=agent_id, **facts
            )
        return stored

    return {"stored": parts_of(request).accounts.run(store)}


@router.get("/api/projects/{project}/agents/{agent_id}/satisfaction", response_model=SatisfactionByVersion)
def satisfied(
    request: Request,
    member: Member,
    agent_id: AgentId,
    key: Annotated[str, Query(min_length=1, max_length=64)] = "overall",
) -> dict[str, Any]:
    """Return the satisfaction with each version, newest first, by the scores of one aspect.

    `satisfaction` is the share of all conversations whose newest score is above 0.5, `low` and `high` its
    95 % interval. They are null with too few conversations, or if none was reported.
    """
    parts = parts_of(request)
    reported = parts.accounts.look(lambda session: counts(session, member.project, agent_id))
    tallies = parts.registry.tally(f"{member.project}/{agent_id}", key, above=THUMB)
    return {"leastConversations": LEAST, "versions": satisfaction(reported, tallies)}
