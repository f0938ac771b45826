"""Links for feedback: the holder of a link rates its responses, once each, without an account.

A link is a secret of 256 random bits; its digest is stored. A request key of link and item ensures that each
response is rated once. The secret is sent in the header `Penstock-Link`, so it appears in no log of URLs. The
page has it behind the `#` of its address, which browsers send to no server.
"""

from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Self

from fastapi import APIRouter, Depends, Header, Request
from pydantic import ConfigDict, Field, model_validator
from sqlalchemy import Integer, func, select
from sqlalchemy.orm import Session

from penstock.gateway.accounts import api_tokens, audit
from penstock.gateway.accounts.principal import (
    LINK,
    BadInput,
    Membership,
    NoSuchThing,
    digest,
    is_secret,
    new_id,
    new_secret,
)
from penstock.gateway.frame.envelope import RATINGS
from penstock.gateway.frame.requests import NUMERIC, Answer, Body, example
from penstock.gateway.frame.route_access import GuardedRoute, Member, parts_of
from penstock.gateway.routes.feedback_routes import (
    AgentId,
    Long,
    NewFeedback,
    NewPair,
    Notes,
    PromptAnswered,
    RatingKept,
    Score,
    Short,
    keep,
    rating_of,
)
from penstock.gateway.store.tables import FeedbackLinkRow

router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_ITEMS: Final = 100
MAX_DAYS: Final = 90
PURPOSE: Final = "link"


class LinkItem(PromptAnswered):
    """One `response` to score, or two `responses` to choose from.

    responses: in the order in which they are shown. version: of the policy that gave them.
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
    """A link for one person. rater: the caller's name of that person, which is not shown to them."""

    model_config = example(items=[{"prompt": "2 + 2?", "response": "4"}], rater="user-7", days=7)

    items: Annotated[list[LinkItem], Field(min_length=1, max_length=MAX_ITEMS)]
    rater: Short = ""
    days: Annotated[int, Field(ge=1, le=MAX_DAYS), NUMERIC] = 7


class LinkRating(Body):
    """A rating of an item by the holder of a link.

    item: counted from 0. score: of a response. chosen: of two responses, the better one, 0 or 1.
    """

    model_config = example(item=0, score=0.8)

    item: Annotated[int, Field(ge=0, lt=MAX_ITEMS), NUMERIC]
    score: Score | None = None
    chosen: Annotated[int, Field(ge=0, le=1), NUMERIC] | None = None
    notes: Notes = ""


class LinkShown(Answer):
    """A link without its secret. items: number of items to rate."""

    id: str
    rater: str
    items: int
    created: datetime
    expires: datetime
    revoked: datetime | None


class LinkMade(LinkShown):
    """A new link. link: its secret, which is shown only once. page: path at which its holder rates."""

    link: str
    page: str


class LinkList(Answer):
    """The links of an agent."""

    links: list[LinkShown]


class ItemToScore(Answer):
    """A response to be scored."""

    prompt: str
    response: str


class ItemToChoose(Answer):
    """Two responses, of which the better one is chosen."""

    prompt: str
    responses: list[str]


class LinkContent(Answer):
    """The items that the holder of a link rates."""

    items: list[ItemToScore | ItemToChoose]
    expires: datetime


def link_of(request: Request, penstock_link: Annotated[str, Header(max_length=64)]) -> FeedbackLinkRow:
    """Return the link of the secret in a request; raises NoSuchThing."""
    accounts = parts_of(request).accounts
    return accounts.run(lambda session, now: _by_secret(session, now, penstock_link))


Link = Annotated[FeedbackLinkRow, Depends(link_of)]


@router.post("/api/projects/{project}/agents/{agent_id}/links", status_code=201, response_model=LinkMade)
def add_link(request: Request, member: Member, agent_id: AgentId, body: NewLink) -> dict[str, Any]:
    """Make a link. Its secret is shown only once."""
    parts, secret, project, by = parts_of(request), new_secret(LINK), member.project, member.principal.subject

    def add(session: Session, now: datetime) -> dict[str, Any]:
        own = FeedbackLinkRow.project == project  # including those that ended in the last day
        stored = session.scalar(select(func.count()).select_from(FeedbackLinkRow).where(own)) or 0
        parts.quotas.check("links", stored)
        shown = {"id": new_id(), "rater": body.rater, "created": now, "revoked": None}
        shown["expires"] = now + timedelta(days=body.days)
        items = [item.model_dump() for item in body.items]
        session.add(
            FeedbackLinkRow(
                **shown, digest=digest(secret), project=project, agent=agent_id, items=items, by=by
            )
        )
        subject, facts = f"link/{shown['id']}", {"agent": agent_id, "items": len(items)}
        audit.note(
            session, now, by=by, action="feedback link added", project=project, subject=subject, **facts
        )
        return {**shown, "items": len(items)}

    return {"link": secret, "page": f"/link#{secret}", **parts.accounts.run_by(member, add)}


@router.get("/api/projects/{project}/agents/{agent_id}/links", response_model=LinkList)
def links(request: Request, member: Member, agent_id: AgentId) -> dict[str, Any]:
    """Return an agent's links, without their secrets."""
    found = parts_of(request).accounts.look(lambda session: _links(session, member.project, agent_id))
    return {"links": found}


@router.delete("/api/projects/{project}/links/{link}", status_code=204)
def revoke_link(request: Request, member: Member, link: str) -> None:
    """Revoke a link: further requests with it are refused. Its ratings stay."""
    parts_of(request).accounts.run_by(member, lambda session, now: _revoke(session, now, member, link))


@router.get("/api/link", response_model=LinkContent)
def read_link(link: Link) -> dict[str, Any]:
    """Return the items that the holder of the link rates."""
    items = [_shown_item(LinkItem.model_validate(item)) for item in link.items]
    return {"items": items, "expires": link.expires}


@router.post("/api/link/ratings", response_model=RatingKept)
def rate(request: Request, link: Link, body: LinkRating) -> dict[str, Any]:
    """Store a rating. Repeating it stores nothing more; another rating of the same item is refused."""
    parts = parts_of(request)
    if body.item >= len(link.items):
        raise BadInput("item", f"this link has the items 0 to {len(link.items) - 1}")
    rating = rating_of(
        _opinion(LinkItem.model_validate(link.items[body.item]), body),
        project=link.project,
        rater=parts.accounts.pseudonym("rater", link.project, PURPOSE, link.rater or link.id),
        request_key=f"link {link.id} {body.item}",  # with blanks, which no key of a caller has
    )
    (kept,) = keep(parts, f"{link.project}/{link.agent}", [rating])
    RATINGS.labels("link").inc()
    return {"id": kept.public_id, "createdAt": kept.created}


def _opinion(item: LinkItem, rating: LinkRating) -> NewFeedback | NewPair:
    """Return the feedback on an item; raises BadInput for a rating of the other kind."""
    answered = item.model_dump(include=set(PromptAnswered.model_fields)) | {"notes": rating.notes}
    if item.responses is None:
        if rating.score is None or rating.chosen is not None:
            raise BadInput("score", f"item {rating.item} is one response: give it a `score`, and choose none")
        return NewFeedback.model_validate(answered | {"response": item.response, "score": rating.score})
    if rating.chosen is None or rating.score is not None:
        raise BadInput("chosen", f"item {rating.item} is two responses: give `chosen`, 0 or 1, and no score")
    chosen, rejected = item.responses[rating.chosen], item.responses[1 - rating.chosen]
    return NewPair.model_validate(answered | {"chosen": chosen, "rejected": rejected})


def _shown_item(item: LinkItem) -> dict[str, Any]:
    """Return the part of an item that its holder sees."""
    shown = {"response": item.response} if item.responses is None else {"responses": item.responses}
    return {"prompt": item.prompt, **shown}


def _by_secret(session: Session, now: datetime, secret: str) -> FeedbackLinkRow:
    row = None
    if is_secret(secret, LINK):
        row = session.scalar(select(FeedbackLinkRow).where(FeedbackLinkRow.digest == digest(secret)))
    if row is None or row.revoked is not None or row.expires <= now:
        raise NoSuchThing("this link is not valid (any more): ask its sender for a new one")
    return row


def _links(session: Session, project: str, agent: str) -> list[dict[str, Any]]:
    """Return the links of an agent, newest first. The database counts the items, which may be long."""
    row = FeedbackLinkRow
    own = (row.project == project) & (row.agent == agent)
    count = func.json_array_length(row.items, type_=Integer).label("items")
    wanted = select(row.id, row.rater, count, row.created, row.expires, row.revoked).where(own)
    found = session.execute(wanted.order_by(row.created.desc()))
    return [dict(one) for one in found.mappings()]


def _revoke(session: Session, now: datetime, member: Membership, link: str) -> None:
    row = session.get(FeedbackLinkRow, link)
    if row is None or row.project != member.project:
        raise NoSuchThing("no such link")
    one, by = FeedbackLinkRow.id == link, member.principal.subject
    api_tokens.revoke_links(session, now, one, project=member.project, by=by)
