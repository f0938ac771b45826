"""Links for feedback: made and revoked by members, used by people without an account.

The secret of a link comes in the header `Penstock-Link`, so that no log of addresses holds it. A page gets it
behind the `#` of its address, which browsers send to no server.
"""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Request
from pydantic import Field

from gateway import people_metrics
from gateway.accounts import feedback_links
from gateway.accounts.account_errors import BadInput
from gateway.accounts.feedback_links import FeedbackLink
from gateway.accounts.principal import Membership
from gateway.feedback.opinion_bodies import AgentId, Opinion, RatedResponse, Short
from gateway.frame.parts import parts_of
from gateway.frame.request_text import Body
from gateway.frame.route_access import GuardedRoute, member_of
from penstock.registry.ratings import Rating

router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_ITEMS: Final = 100
PURPOSE: Final = "link"

Member = Annotated[Membership, Depends(member_of)]


class NewLink(Body):
    """Responses that one person shall rate. rater: what the caller calls that person; not shown to them."""

    items: Annotated[list[RatedResponse], Field(min_length=1, max_length=MAX_ITEMS)]
    rater: Short = ""
    days: Annotated[int, Field(ge=1, le=feedback_links.MAX_DAYS)] = 7


class LinkRating(Opinion):
    """What the holder of a link thinks of one of its responses. item: counted from 0."""

    item: Annotated[int, Field(ge=0, lt=MAX_ITEMS)]


def link_of(request: Request, penstock_link: Annotated[str, Header(max_length=64)]) -> FeedbackLink:
    """Return the link whose secret a request carries; raises NoSuchThing."""
    accounts = parts_of(request).accounts
    return accounts.run(lambda session, now: feedback_links.by_secret(session, now, penstock_link))


Link = Annotated[FeedbackLink, Depends(link_of)]


@router.post("/api/projects/{project}/agents/{agent_id}/links", status_code=201)
def add_link(request: Request, member: Member, agent_id: AgentId, body: NewLink) -> dict[str, Any]:
    """Make a link; its secret is shown this once."""
    items = [item.model_dump() for item in body.items]
    made, secret = parts_of(request).accounts.run(
        lambda session, now: feedback_links.add(
            session, now, member, agent=agent_id, items=items, rater=body.rater, days=body.days
        )
    )
    return {"link": secret, **_shown(made)}


@router.get("/api/projects/{project}/agents/{agent_id}/links")
def links(request: Request, member: Member, agent_id: AgentId) -> dict[str, Any]:
    """Return an agent's links, without their secrets."""
    found = parts_of(request).accounts.look(
        lambda session: feedback_links.links(session, member.project, agent_id)
    )
    return {"links": [_shown(one) for one in found]}


@router.delete("/api/projects/{project}/links/{link}", status_code=204)
def revoke_link(request: Request, member: Member, link: str) -> None:
    """Revoke a link: the next request with it is refused. Ratings that came by it stay."""
    by, name = member.principal.subject, member.project
    parts_of(request).accounts.run(
        lambda session, now: feedback_links.revoke(session, now, project=name, link=link, by=by)
    )


@router.get("/api/link")
def read_link(link: Link) -> dict[str, Any]:
    """Return what the holder of a link is asked to rate."""
    items = [{"prompt": item["prompt"], "response": item["response"]} for item in link.items]
    return {"items": items, "expires": link.expires}


@router.post("/api/link/ratings")
def rate(request: Request, link: Link, body: LinkRating) -> dict[str, Any]:
    """Store a rating; the same again stores nothing more, and another one of the same item is refused."""
    parts = parts_of(request)
    if body.item >= len(link.items):
        raise BadInput("item", f"this link has the items 0 to {len(link.items) - 1}")
    item = RatedResponse.model_validate(link.items[body.item])
    rating = Rating(
        prompt=item.prompt,
        response=item.response,
        score=body.score,
        key=item.key,
        version=item.version,
        conversation=item.conversation,
        project=link.project,
        run=item.runId,
        rater=parts.accounts.pseudonym("rater", link.project, PURPOSE, link.rater or link.id),
        notes=body.notes,
        request_key=link.request_key(body.item),
    )
    (kept,) = parts.registry.add_ratings(f"{link.project}/{link.agent}", [rating])
    people_metrics.RATINGS.labels("link").inc()
    return {"id": kept.public_id, "createdAt": kept.created}


def _shown(link: FeedbackLink) -> dict[str, Any]:
    return {
        "id": link.id,
        "rater": link.rater,
        "items": len(link.items),
        "created": link.created,
        "expires": link.expires,
        "revoked": link.revoked,
    }
