"""How content people are with the versions of an agent, and the conversations by which that is judged."""

from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from sqlalchemy.orm import Session

from penstock.gateway import satisfaction
from penstock.gateway.accounts import audit
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.feedback.feedback_rows import AgentId
from penstock.gateway.frame.parts import parts_of
from penstock.gateway.frame.requests import NUMERIC, Body, Text, answers, example
from penstock.gateway.frame.route_access import GuardedRoute, member_of
from penstock.gateway.routes.feedback_routes import SatisfactionByVersion, Stored

router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_CONVERSATIONS: Final = 1000

Member = Annotated[Membership, Depends(member_of)]
Conversation = Annotated[Text, Field(min_length=1, max_length=128)]


class Conversations(Body):
    """Conversations that a version of an agent has had; each counts once, however often it is told."""

    model_config = example(version=15, conversations=["talk-1", "talk-2"])

    version: Annotated[int, Field(ge=1, lt=2**63), NUMERIC]
    conversations: Annotated[list[Conversation], Field(min_length=1, max_length=MAX_CONVERSATIONS)]


@router.post(
    "/api/projects/{project}/agents/{agent_id}/conversations", status_code=201, responses=answers(Stored, 201)
)
def tell(request: Request, member: Member, agent_id: AgentId, body: Conversations) -> dict[str, int]:
    """Tell which conversations a version has had, whether anybody rates them or not."""
    name, by, quotas = member.project, member.principal.subject, parts_of(request).quotas

    def store(session: Session, now: datetime) -> int:
        stored = satisfaction.note(session, name, agent_id, body.version, body.conversations)
        if stored:
            quotas.check("conversations", satisfaction.told_before(session, name, stored), stored)
            said = {"version": body.version, "conversations": stored}
            audit.note(
                session, now, by=by, action="conversations told", project=name, subject=agent_id, **said
            )
        return stored

    return {"stored": parts_of(request).accounts.run(store)}


@router.get(
    "/api/projects/{project}/agents/{agent_id}/satisfaction", responses=answers(SatisfactionByVersion)
)
def satisfied(
    request: Request,
    member: Member,
    agent_id: AgentId,
    key: Annotated[str, Query(min_length=1, max_length=64)] = "overall",
) -> dict[str, Any]:
    """Return the satisfaction with each version, newest first, by the scores of one aspect.

    `satisfaction` is the share of all conversations whose newest score is above 0.5, `low` and `high` its
    interval of 95 %; they are null where there are too few conversations to tell, or none was reported.
    """
    parts = parts_of(request)
    told = parts.accounts.look(lambda session: satisfaction.counts(session, member.project, agent_id))
    tallies = parts.registry.tally(f"{member.project}/{agent_id}", key, above=satisfaction.THUMB)
    found = satisfaction.satisfaction(told, tallies)
    return {"leastConversations": satisfaction.LEAST, "versions": [_shown(one) for one in found]}


def _shown(one: satisfaction.Satisfaction) -> dict[str, Any]:
    return {
        "version": one.version,
        "conversations": one.conversations,
        "rated": one.rated,
        "ratingRate": one.rated / one.conversations if one.conversations else None,
        "thumbsUp": one.thumbs_up,
        "satisfaction": one.share,
        "low": one.low,
        "high": one.high,
        "verdict": "cannot tell" if one.share is None else "told",
    }
