"""Feedback of people and programs on what an agent answered: one rating at a time, or many as JSON lines.

Ratings lie in the registry under the policy `PROJECT/AGENT`. Who rated is an opaque id there, of the caller
and, where a program says so, of the user that it speaks for.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import Field, ValidationError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from gateway import people_metrics
from gateway.accounts import audit
from gateway.accounts.principal import Membership, Principal
from gateway.frame.api_errors import ApiError
from gateway.frame.parts import Parts, parts_of
from gateway.frame.route_access import GuardedRoute, member_of, principal_of
from gateway.jobs.trained_from import trained_from
from gateway.routes.request_text import Body, Text
from penstock.registry.ratings import KeptRating, Rating

router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_TEXT: Final = 200_000
MAX_LINES: Final = 10_000
MAX_EXPORTED: Final = 1000
MAX_EXPORTED_CHARS: Final = 4_000_000
"""Of the texts in one answer, which is made as a whole."""

Member = Annotated[Membership, Depends(member_of)]
AgentId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,38}$")]
Key = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")]
Short = Annotated[Text, Field(max_length=64)]
Long = Annotated[Text, Field(min_length=1, max_length=MAX_TEXT)]


class JsonLines(Response):
    """An answer of one JSON object a line."""

    media_type = "application/x-ndjson"


class RatedResponse(Body):
    """A response to a prompt.

    runId: the run of the caller's own that it came from. key: the aspect that is rated. conversation: its id
    at the caller's. version: of the policy that responded.
    """

    prompt: Long
    response: Long
    runId: Short = ""  # noqa: N815 - as callers of the service know it
    key: Annotated[Text, Field(min_length=1, max_length=64)] = "overall"
    version: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    conversation: Annotated[Text, Field(max_length=128)] = ""


class Opinion(Body):
    """A score from 0 to 1, a number and no word for one, and what may be said beside it."""

    score: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    notes: Annotated[Text, Field(max_length=MAX_TEXT)] = ""


class NewFeedback(RatedResponse, Opinion):
    """A response and what somebody thinks of it.

    rater: the user whom the caller speaks for; only an opaque id of them is stored.
    """

    rater: Short = ""


class FeedbackLine(NewFeedback):
    """A line of an import. request: a key under which it is stored once, however often it comes."""

    request: Key | None = None


@router.post("/api/policies/feedback/{agent_id}")
def give(
    request: Request,
    member: Member,
    agent_id: AgentId,
    body: NewFeedback,
    idempotency_key: Annotated[Key | None, Header()] = None,
) -> dict[str, Any]:
    """Store one rating. With an `Idempotency-Key` the same request again stores nothing more."""
    parts = parts_of(request)
    rating = _rating(parts, member, body, idempotency_key)
    (kept,) = parts.registry.add_ratings(_policy(member, agent_id), [rating])
    people_metrics.RATINGS.labels("call").inc()
    return {"id": kept.public_id, "agentId": agent_id, "createdAt": kept.created}


@router.get("/api/projects/{project}/agents/{agent_id}/feedback", response_class=JsonLines)
def export(
    request: Request,
    member: Member,
    agent_id: AgentId,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_EXPORTED)] = MAX_EXPORTED,
) -> Response:
    """Return ratings behind number `after` as JSON lines, oldest first; ask on with the last `number`.

    Long ones come fewer at a time; an answer without a line is the end.
    """
    found = parts_of(request).registry.ratings(
        _policy(member, agent_id), after, limit, most_chars=MAX_EXPORTED_CHARS
    )
    lines = "".join(f"{json.dumps(_exported(one))}\n" for one in found)
    return JsonLines(lines)


@router.post(
    "/api/projects/{project}/agents/{agent_id}/feedback",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {JsonLines.media_type: {"schema": {"type": "string"}}},
        }
    },
)
async def take_in(request: Request, member: Member, agent_id: AgentId) -> dict[str, int]:
    """Store ratings that come as JSON lines, all or none; lines of an export may be sent as they are."""
    content = await request.body()
    return await run_in_threadpool(_take_in, parts_of(request), member, agent_id, content)


@router.delete("/api/projects/{project}/raters/{rater}")
def forget_rater(request: Request, member: Member, rater: str) -> dict[str, Any]:
    """Delete every rating of a rater in this project, by the opaque id that an export shows.

    `trainedFrom` names the trainings that have read some of them.
    """
    deleted, trained = _forget(parts_of(request), member.principal, member.project, rater)
    return {"deleted": deleted, "trainedFrom": trained}


@router.delete("/api/me/feedback")
def forget_me(request: Request, caller: Annotated[Principal, Depends(principal_of)]) -> dict[str, Any]:
    """Delete every rating that the caller gave in the projects that they belong to.

    `trainedFrom` names the trainings that have read some of them.
    """
    parts, deleted, trained = parts_of(request), 0, list[dict[str, Any]]()
    for one in parts.accounts.projects_of(caller):
        count, named = _forget(parts, caller, one.project, _rater(parts, one, ""))
        deleted += count
        trained += named
    return {"deleted": deleted, "trainedFrom": trained}


def _take_in(parts: Parts, member: Membership, agent: str, content: bytes) -> dict[str, int]:
    new = [_rating(parts, member, line, line.request) for line in _lines(content)]
    parts.registry.add_ratings(_policy(member, agent), new)
    people_metrics.RATINGS.labels("lines").inc(len(new))
    by, project = member.principal.subject, member.project
    parts.accounts.run(
        lambda session, now: audit.note(
            session, now, by=by, action="feedback taken in", project=project, subject=agent, lines=len(new)
        )
    )
    return {"stored": len(new)}


def _lines(content: bytes) -> Iterator[FeedbackLine]:
    """Yield the lines; raises ApiError that names the first wrong one by its number."""
    lines = content.splitlines()
    if len(lines) > MAX_LINES:
        raise ApiError(413, f"{len(lines)} lines: send at most {MAX_LINES} at a time")
    for number, line in enumerate(lines, 1):
        try:
            known = json.loads(line)
            if isinstance(known, dict):
                known = {key: value for key, value in known.items() if key not in _ONLY_EXPORTED}
            yield FeedbackLine.model_validate(known)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or None
            raise ApiError(422, f"line {number}: {field}: {first['msg']}", field=field) from error
        except (ValueError, RecursionError) as error:
            raise ApiError(422, f"line {number}: not JSON") from error


_ONLY_EXPORTED: Final = frozenset({"number", "id", "createdAt", "raterId"})


def _exported(kept: KeptRating) -> dict[str, Any]:
    rating = kept.rating
    return {
        "number": kept.number,
        "id": kept.public_id,
        "createdAt": kept.created.isoformat(),
        "raterId": rating.rater,
        "prompt": rating.prompt,
        "response": rating.response,
        "score": rating.score,
        "runId": rating.run,
        "notes": rating.notes,
        "key": rating.key,
        "version": rating.version,
        "conversation": rating.conversation,
        "request": rating.request_key,
    }


def _rating(parts: Parts, member: Membership, body: NewFeedback, request_key: str | None) -> Rating:
    return Rating(
        prompt=body.prompt,
        response=body.response,
        score=body.score,
        key=body.key,
        version=body.version,
        conversation=body.conversation,
        project=member.project,
        run=body.runId,
        rater=_rater(parts, member, body.rater),
        notes=body.notes,
        request_key=request_key,
    )


def _rater(parts: Parts, member: Membership, spoken_for: str) -> str:
    return parts.accounts.pseudonym("rater", member.project, member.principal.subject, spoken_for)


def _policy(member: Membership, agent: str) -> str:
    return f"{member.project}/{agent}"


def _forget(parts: Parts, by: Principal, project: str, rater: str) -> tuple[int, list[dict[str, Any]]]:
    """Delete the ratings of a rater, audited; returns how many there were, and what was trained from them."""
    found = parts.registry.delete_ratings(project, rater)
    deleted = sum(map(len, found.values()))

    def note(session: Session, now: datetime) -> list[dict[str, Any]]:
        trained = trained_from(session, project, found)
        audit.note(
            session,
            now,
            by=by.subject,
            action="ratings deleted",
            project=project,
            subject=f"rater/{rater}",
            deleted=deleted,
            trained=[one["job"] for one in trained],
        )
        return trained

    return deleted, parts.accounts.run(note)
