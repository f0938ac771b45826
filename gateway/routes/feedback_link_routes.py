"""Links for feedback: made and revoked by members, used by people without an account.

The secret of a link comes in the header `Penstock-Link`, so that no log of addresses holds it. A page gets it
behind the `#` of its address, which browsers send to no server.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Self

from fastapi import APIRouter, Depends, Header, Request
from pydantic import ConfigDict, Field, model_validator
from sqlalchemy.orm import Session

from gateway import people_metrics
from gateway.accounts import feedback_links
from gateway.accounts.account_errors import BadInput
from gateway.accounts.feedback_links import FeedbackLink, LinkSummary
from gateway.accounts.principal import Membership
from gateway.feedback.opinion_bodies import (
    AgentId,
    Long,
    NewFeedback,
    NewPair,
    Notes,
    PromptAnswered,
    Score,
    Short,
    rating_of,
)
from gateway.frame.answer import answers
from gateway.frame.parts import parts_of
from gateway.frame.request_numbers import NUMERIC
from gateway.frame.request_text import Body, example
from gateway.frame.route_access import GuardedRoute, member_of
from gateway.routes.feedback_answers import LinkContent, LinkList, LinkMade, RatingKept
from gateway.routes.feedback_routes import keep

router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_ITEMS: Final = 100
PURPOSE: Final = "link"

Member = Annotated[Membership, Depends(member_of)]


class LinkItem(PromptAnswered):
    """A response to score, or two of which the better one is chosen: `response` or `responses`.

    responses: as they shall be shown. version: of the policy that gave the response, or both.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["response"]}, {"required": ["responses"]}]}
    )

    response: Long | None = None
    responses: Annotated[list[Long], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.response is None) == (self.responses is None):
            raise ValueError("give `response`, or two `responses` of which one is chosen")
        if self.responses is not None and self.responses[0] == self.responses[1]:
            raise ValueError("`responses` must differ: of two that are the same none is better")
        return self


class NewLink(Body):
    """What one person shall rate. rater: what the caller calls that person; not shown to them."""

    model_config = example(items=[{"prompt": "2 + 2?", "response": "4"}], rater="user-7", days=7)

    items: Annotated[list[LinkItem], Field(min_length=1, max_length=MAX_ITEMS)]
    rater: Short = ""
    days: Annotated[int, Field(ge=1, le=feedback_links.MAX_DAYS), NUMERIC] = 7


class LinkRating(Body):
    """What the holder of a link thinks of one of its items.

    item: counted from 0. score: of a response. chosen: of two responses, the better one, 0 or 1.
    """

    model_config = example(item=0, score=0.8)

    item: Annotated[int, Field(ge=0, lt=MAX_ITEMS), NUMERIC]
    score: Score | None = None
    chosen: Annotated[int, Field(ge=0, le=1), NUMERIC] | None = None
    notes: Notes = ""


def link_of(request: Request, penstock_link: Annotated[str, Header(max_length=64)]) -> FeedbackLink:
    """Return the link whose secret a request carries; raises NoSuchThing."""
    accounts = parts_of(request).accounts
    return accounts.run(lambda session, now: feedback_links.by_secret(session, now, penstock_link))


Link = Annotated[FeedbackLink, Depends(link_of)]


@router.post(
    "/api/projects/{project}/agents/{agent_id}/links", status_code=201, responses=answers(LinkMade, 201)
)
def add_link(request: Request, member: Member, agent_id: AgentId, body: NewLink) -> dict[str, Any]:
    """Make a link; its secret is shown this once. page: the address at which its holder rates."""
    items, parts = [item.model_dump() for item in body.items], parts_of(request)

    def add(session: Session, now: datetime) -> tuple[LinkSummary, str]:
        parts.quotas.check("links", feedback_links.stored(session, member.project))
        return feedback_links.add(
            session, now, member, agent=agent_id, items=items, rater=body.rater, days=body.days
        )

    made, secret = parts.accounts.run_by(member, add)
    return {"link": secret, "page": f"/link#{secret}", **made._asdict()}


@router.get("/api/projects/{project}/agents/{agent_id}/links", responses=answers(LinkList))
def links(request: Request, member: Member, agent_id: AgentId) -> dict[str, Any]:
    """Return an agent's links, without their secrets."""
    found = parts_of(request).accounts.look(
        lambda session: feedback_links.links(session, member.project, agent_id)
    )
    return {"links": [one._asdict() for one in found]}


@router.delete("/api/projects/{project}/links/{link}", status_code=204)
def revoke_link(request: Request, member: Member, link: str) -> None:
    """Revoke a link: the next request with it is refused. Ratings that came by it stay."""
    by, name = member.principal.subject, member.project
    parts_of(request).accounts.run_by(
        member, lambda session, now: feedback_links.revoke(session, now, project=name, link=link, by=by)
    )


@router.get("/api/link", responses=answers(LinkContent))
def read_link(link: Link) -> dict[str, Any]:
    """Return what the holder of a link is asked to rate."""
    items = [_shown_item(LinkItem.model_validate(item)) for item in link.items]
    return {"items": items, "expires": link.expires}


@router.post("/api/link/ratings", responses=answers(RatingKept))
def rate(request: Request, link: Link, body: LinkRating) -> dict[str, Any]:
    """Store a rating; the same again stores nothing more, and another one of the same item is refused."""
    parts = parts_of(request)
    if body.item >= len(link.items):
        raise BadInput("item", f"this link has the items 0 to {len(link.items) - 1}")
    rating = rating_of(
        _opinion(LinkItem.model_validate(link.items[body.item]), body),
        project=link.project,
        rater=parts.accounts.pseudonym("rater", link.project, PURPOSE, link.rater or link.id),
        request_key=link.request_key(body.item),
    )
    (kept,) = keep(parts, f"{link.project}/{link.agent}", [rating])
    people_metrics.RATINGS.labels("link").inc()
    return {"id": kept.public_id, "createdAt": kept.created}


def _opinion(item: LinkItem, said: LinkRating) -> NewFeedback | NewPair:
    """Return an item with what was said of it; raises BadInput for a word that is of the other kind."""
    answered = item.model_dump(include=set(PromptAnswered.model_fields)) | {"notes": said.notes}
    if item.responses is None:
        if said.score is None or said.chosen is not None:
            raise BadInput("score", f"item {said.item} is one response: give it a `score`, and choose none")
        return NewFeedback.model_validate(answered | {"response": item.response, "score": said.score})
    if said.chosen is None or said.score is not None:
        raise BadInput("chosen", f"item {said.item} is two responses: give `chosen`, 0 or 1, and no score")
    chosen, rejected = item.responses[said.chosen], item.responses[1 - said.chosen]
    return NewPair.model_validate(answered | {"chosen": chosen, "rejected": rejected})


def _shown_item(item: LinkItem) -> dict[str, Any]:
    """Return what the holder sees: of where it came from nothing."""
    said = {"response": item.response} if item.responses is None else {"responses": item.responses}
    return {"prompt": item.prompt, **said}
