"""Links for feedback: who holds one rates the responses that it names, once each, without an account.

A link is a secret of 256 random bits of which the digest is stored. That each response is rated once is held
by the ratings: they carry a request key of the link and the item. The secret comes in the header
`Penstock-Link`, so that no log of addresses holds it. A page gets it behind the `#` of its address, which
browsers send to no server.
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
    days: Annotated[int, Field(ge=1, le=MAX_DAYS), NUMERIC] = 7


class LinkRating(Body):
    """What the holder of a link thinks of one of its items.

    item: counted from 0. score: of a response. chosen: of two responses, the better one, 0 or 1.
    """

    model_config = example(item=0, score=0.8)

    item: Annotated[int, Field(ge=0, lt=MAX_ITEMS), NUMERIC]
    score: Score | None = None
    chosen: Annotated[int, Field(ge=0, le=1), NUMERIC] | None = None
    notes: Notes = ""


class LinkShown(Answer):
    """A link without its secret. items: how many there are to rate."""

    id: str
    rater: str
    items: int
    created: datetime
    expires: datetime
    revoked: datetime | None


class LinkMade(LinkShown):
    """A new link. link: its secret, which is shown this once. page: the address at which its holder rates."""

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
    """Two responses, of which the better one is to be chosen."""

    prompt: str
    responses: list[str]


class LinkContent(Answer):
    """What the holder of a link is asked to rate."""

    items: list[ItemToScore | ItemToChoose]
    expires: datetime


def link_of(request: Request, penstock_link: Annotated[str, Header(max_length=64)]) -> FeedbackLinkRow:
    """Return the link whose secret a request carries; raises NoSuchThing."""
    accounts = parts_of(request).accounts
    return accounts.run(lambda session, now: _by_secret(session, now, penstock_link))


Link = Annotated[FeedbackLinkRow, Depends(link_of)]


@router.post("/api/projects/{project}/agents/{agent_id}/links", status_code=201, response_model=LinkMade)
def add_link(request: Request, member: Member, agent_id: AgentId, body: NewLink) -> dict[str, Any]:
    """Make a link; its secret is shown this once. page: the address at which its holder rates."""
    parts, secret, project, by = parts_of(request), new_secret(LINK), member.project, member.principal.subject

    def add(session: Session, now: datetime) -> dict[str, Any]:
        own = FeedbackLinkRow.project == project  # one that has ended counts for a day
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
    """Revoke a link: the next request with it is refused. Ratings that came by it stay."""
    parts_of(request).accounts.run_by(member, lambda session, now: _revoke(session, now, member, link))


@router.get("/api/link", response_model=LinkContent)
def read_link(link: Link) -> dict[str, Any]:
    """Return what the holder of a link is asked to rate."""
    items = [_shown_item(LinkItem.model_validate(item)) for item in link.items]
    return {"items": items, "expires": link.expires}


@router.post("/api/link/ratings", response_model=RatingKept)
def rate(request: Request, link: Link, body: LinkRating) -> dict[str, Any]:
    """Store a rating; the same again stores nothing more, and another one of the same item is refused."""
    parts = parts_of(request)
    if body.item >= len(link.items):
        raise BadInput("item", f"this link has the items 0 to {len(link.items) - 1}")
    rating = rating_of(
        _opinion(LinkItem.model_validate(link.items[body.item]), body),
        project=link.project,
        rater=parts.accounts.pseudonym("rater", link.project, PURPOSE, link.rater or link.id),
        request_key=f"link/{link.id}/{body.item}",
    )
    (kept,) = keep(parts, f"{link.project}/{link.agent}", [rating])
    RATINGS.labels("link").inc()
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


def _by_secret(session: Session, now: datetime, secret: str) -> FeedbackLinkRow:
    row = None
    if is_secret(secret, LINK):
        row = session.scalar(select(FeedbackLinkRow).where(FeedbackLinkRow.digest == digest(secret)))
    if row is None or row.revoked is not None or row.expires <= now:
        raise NoSuchThing("this link does not count, or no more: ask who sent it for a new one")
    return row


def _links(session: Session, project: str, agent: str) -> list[dict[str, Any]]:
    """Return the links of an agent, newest first; the database counts their items, which may be long."""
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
