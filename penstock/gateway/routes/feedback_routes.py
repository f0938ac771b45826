"""Feedback of people and programs on responses of an agent: one rating at a time, or many as JSON lines.

Ratings are stored in the registry under the policy `PROJECT/AGENT`. The rater is an opaque id of the caller,
or of the user that a program speaks for. Late rewards are stored with those that reached a server of the
policy too late for training: no training uses them, `penstock traces evaluate --late` does.

Formats of JSON lines, in imports (where they may be the items of one list) and exports:

    {"prompt", "response", "score", …}       a score of a response
    {"prompt", "chosen", "rejected", …}      which of two responses is better
    {"episode", "step", "amount", …}         a late reward

Reward models are trained from the same names, so an export can be used for training as it is.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.principal import Membership, Principal
from penstock.gateway.frame.envelope import RATINGS
from penstock.gateway.frame.requests import (
    NUMERIC,
    Answer,
    ApiError,
    Body,
    Number,
    Text,
    example,
    field_of,
    storable,
)
from penstock.gateway.frame.route_access import (
    GuardedRoute,
    Member,
    Parts,
    audited,
    parts_of,
    principal_of,
)
from penstock.gateway.jobs.job_queue import trained_from
from penstock.gateway.store.tables import JobState
from penstock.registry.feedback import MAX_EPISODE_ID_LENGTH, Feedback
from penstock.registry.ratings import KeptRating, Rating
from penstock.registry.records import NoRoom
from penstock.registry.registry import Registry
from penstock.registry.row_file import RowFile

# ---- Bodies of requests: a score of a response, or the better one of two responses.

MAX_TEXT: Final = 200_000

AgentId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,38}$")]
Key = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")]
Short = Annotated[Text, Field(max_length=64)]
Long = Annotated[Text, Field(min_length=1, max_length=MAX_TEXT)]
Notes = Annotated[Text, Field(max_length=MAX_TEXT)]
Score = Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]


def _prompt(value: Any) -> Any:
    """Return a prompt; raises PydanticCustomError, which names the prompt and not a kind of it."""
    turns = value if isinstance(value, list) else [{"role": "user", "content": value}]
    texts = [text for one in turns if isinstance(one, dict) and one.keys() == _TURN for text in one.values()]
    if not turns or len(texts) != len(_TURN) * len(turns) or not all(isinstance(one, str) for one in texts):
        detail = "must be a text, or a list of messages, each with the texts `role` and `content`"
        raise PydanticCustomError("no_prompt", detail)
    size = sum(len(storable(one["role"])[64:] + storable(one["content"])) for one in turns)
    if not value or size > MAX_TEXT:
        raise PydanticCustomError("no_prompt", "must have 1 to {most} characters", {"most": MAX_TEXT})
    return value


def _alone(value: Any) -> Any:
    """Return the text of a conversation of one message, as which some write a response; others unchanged."""
    match value:
        case [{"content": text}]:
            return text
        case _:
            return value


_TURN: Final = {"role", "content"}
_MESSAGE: Final = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in sorted(_TURN)},
    "required": sorted(_TURN),
    "additionalProperties": False,
}
_PROMPT: Final = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_TEXT},
        {"type": "array", "items": _MESSAGE, "minItems": 1},
    ]
}
Prompt = Annotated[str | list[dict[str, str]], PlainValidator(_prompt), WithJsonSchema(_PROMPT)]
Reply = Annotated[Long, BeforeValidator(_alone)]


class Answered(Body):
    """The origin of an answer.

    runId: id of a run of the caller. key: the aspect that is rated. conversation: its id at the caller.
    version: of the policy that responded.
    """

    runId: Short = ""  # noqa: N815 - as callers of the service know it
    key: Annotated[Text, Field(min_length=1, max_length=64)] = "overall"
    version: Annotated[int, Field(ge=1, lt=2**63), NUMERIC] | None = None
    conversation: Annotated[Text, Field(max_length=128)] = ""


class PromptAnswered(Answered):
    """A prompt, and the origin of the answer."""

    prompt: Long


class Opinion(Body):
    """A score from 0 to 1, as a number, with optional notes."""

    score: Score
    notes: Notes = ""


class NewFeedback(Answered, Opinion):
    """A response and its score.

    prompt: a text, or a conversation. response: a text, or a list of one message with it. rater: the user
    that the caller speaks for; only an opaque id is stored.
    """

    model_config = example(prompt="2 + 2?", response="4", score=0.9, runId="run-1", notes="right")

    prompt: Prompt
    response: Reply
    rater: Short = ""


class NewPair(Answered):
    """Two responses to a prompt, of which one is preferred; `prompt` as of a score.

    chosen: the better one; `version` is of the policy that gave it. rejected: the other one. rater: the user
    that the caller speaks for; only an opaque id is stored.
    """

    model_config = example(prompt="2 + 2?", chosen="4", rejected="5")

    prompt: Prompt
    chosen: Reply
    rejected: Reply
    notes: Notes = ""
    rater: Short = ""

    @field_validator("rejected")
    @classmethod
    def _differs(cls, rejected: str, info: ValidationInfo) -> str:
        if rejected == info.data.get("chosen"):
            raise ValueError("must differ from `chosen`: of two responses that are the same none is better")
        return rejected


class FeedbackRow(NewFeedback):
    """A row of an import. request: a key under which it is stored once, however often it comes."""

    request: Key | None = None


class PairRow(NewPair):
    """A row of an import. request: a key under which it is stored once, however often it comes."""

    request: Key | None = None


def rating_of(body: NewFeedback | NewPair, *, project: str, rater: str, request_key: str | None) -> Rating:
    """Return the rating of a body for the registry.

    rater: opaque id. request_key: makes sure that it is stored once; None: it is stored again each time.
    """
    kind: dict[str, Any] = (
        {"response": body.chosen, "rejected": body.rejected}
        if isinstance(body, NewPair)
        else {"response": body.response, "score": body.score}
    )
    same = body.model_dump(include={"prompt", "key", "version", "conversation", "notes"})
    return Rating(**kind, **same, project=project, run=body.runId, rater=rater, request_key=request_key)


MAX_ROWS: Final = 10_000
_PAGE_OF_ROWS: Final = 1000
_PAGE_OF_CHARS: Final = 4_000_000
ONLY_EXPORTED: Final = frozenset({"number", "id", "createdAt", "raterId"})
"""Fields of an export that an import ignores: new ones are made."""


def rating_row(kept: KeptRating) -> dict[str, Any]:
    """Return a rating as a row of an export. A key that a link made, with blanks, gives way to the id."""
    rating = kept.rating
    kind = (
        {"response": rating.response, "score": rating.score}
        if rating.rejected is None
        else {"chosen": rating.response, "rejected": rating.rejected}
    )
    return {
        "number": kept.number,
        "id": kept.public_id,
        "createdAt": kept.created,
        "raterId": rating.rater,
        "prompt": rating.prompt,
        **kind,
        "runId": rating.run,
        "notes": rating.notes,
        "key": rating.key,
        "version": rating.version,
        "conversation": rating.conversation,
        "request": kept.public_id if " " in (rating.request_key or "") else rating.request_key,
    }


def late_row(late: Feedback) -> dict[str, Any]:
    return {
        "number": late.number,
        "createdAt": late.time,
        "episode": late.episode,
        "step": late.step,
        "amount": late.amount,
    }


def as_lines(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as JSON lines, with times in ISO 8601."""
    return "".join(f"{json.dumps(row, default=datetime.isoformat)}\n" for row in rows)


def read_lines(content: bytes) -> Iterator[FeedbackRow | PairRow]:
    """Yield the rows of JSON lines, or of one list; raises ApiError that names the first wrong one."""
    found = RowFile.of_bytes(content, most_rows=MAX_ROWS + 1)
    if sum(1 for _ in islice(found.lines(), MAX_ROWS + 1)) > MAX_ROWS:
        raise ApiError(413, f"more than {MAX_ROWS} rows: send at most {MAX_ROWS} at a time")
    for number, _, line in found.lines():
        try:
            yield _row(json.loads(line.decode("utf-8-sig")))
        except ValidationError as error:
            first = error.errors()[0]
            field = field_of(first["loc"])
            raise ApiError(422, f"{found.unit} {number}: {field}: {first['msg']}", field=field) from error
        except (ValueError, RecursionError) as error:
            raise ApiError(422, f"{found.unit} {number}: not JSON") from error


def _row(row: Any) -> FeedbackRow | PairRow:
    """Return a row; raises ValidationError. Columns of the other kind of row may be null."""
    if not isinstance(row, dict):
        return FeedbackRow.model_validate(row)
    known = {key: value for key, value in row.items() if key not in ONLY_EXPORTED}
    if known.get("chosen") is None and known.get("rejected") is None:
        return FeedbackRow.model_validate(_without(known, ("chosen", "rejected")))
    return PairRow.model_validate(_without(known, ("response", "score")))


def _without(row: dict[str, Any], columns: tuple[str, str]) -> dict[str, Any]:
    """Return a row without these columns where they are null, as in tables with both kinds of rows."""
    return {key: value for key, value in row.items() if key not in columns or value is not None}


def ratings_of(registry: Registry, policy: str) -> Iterator[KeptRating]:
    """Yield all ratings of `PROJECT/AGENT`, oldest first, with a few megabytes in memory at a time."""
    number = 0
    while page := registry.ratings(policy, number, _PAGE_OF_ROWS, most_chars=_PAGE_OF_CHARS):
        yield from page
        number = page[-1].number


# ---- Answers about feedback, as the document describes them.


class RatingKept(Answer):
    """A rating that is stored, under its public id."""

    id: str
    createdAt: datetime  # noqa: N815 - as callers of the service know it


class FeedbackStored(RatingKept):
    """A rating or pair of an agent that is stored."""

    agentId: str  # noqa: N815


class Stored(Answer):
    """The number of stored rows."""

    stored: int


class TrainedFrom(Answer):
    """A training that used deleted ratings. version: of its policy, null without one."""

    project: str
    agent: str
    job: str
    state: JobState
    version: str | None


class Deletion(Answer):
    """Numbers of deleted ratings and late rewards, and the trainings that used the ratings."""

    deleted: int
    lateRewards: int  # noqa: N815
    trainedFrom: list[TrainedFrom]  # noqa: N815


router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_EXPORTED: Final = 1000
MAX_EXPORTED_CHARS: Final = 4_000_000
"""Most characters of text in one answer, which is made in memory."""


class JsonLines(Response):
    """An answer of one JSON object a line."""

    media_type = "application/x-ndjson"


After = Annotated[int, Query(ge=0, lt=2**63)]
Limit = Annotated[int, Query(ge=1, le=MAX_EXPORTED)]
_LINES: Final = """\
{"prompt": "2 + 2?", "response": "4", "score": 0.9}
{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
"""


@router.post("/api/policies/feedback/{agent_id}", response_model=FeedbackStored)
def give(
    request: Request,
    member: Member,
    agent_id: AgentId,
    body: NewFeedback,
    idempotency_key: Annotated[Key | None, Header()] = None,
) -> dict[str, Any]:
    """Store one rating. With an `Idempotency-Key`, repeating the request stores nothing more."""
    return _given(request, member, agent_id, body, idempotency_key)


@router.post(
    "/api/projects/{project}/agents/{agent_id}/pairs", status_code=201, response_model=FeedbackStored
)
def prefer(
    request: Request,
    member: Member,
    agent_id: AgentId,
    body: NewPair,
    idempotency_key: Annotated[Key | None, Header()] = None,
) -> dict[str, Any]:
    """Store which of two responses is better. With an `Idempotency-Key` it is stored once."""
    return _given(request, member, agent_id, body, idempotency_key)


@router.get("/api/projects/{project}/agents/{agent_id}/feedback", response_class=JsonLines)
def export(
    request: Request,
    member: Member,
    agent_id: AgentId,
    after: After = 0,
    limit: Limit = MAX_EXPORTED,
) -> Response:
    """Return ratings and pairs after number `after`, oldest first; continue with the last `number`.

    The number of rows depends on their length. An answer without a row is the end.
    """
    found = parts_of(request).registry.ratings(
        _policy(member, agent_id), after, limit, most_chars=MAX_EXPORTED_CHARS
    )
    return JsonLines(as_lines(rating_row(one) for one in found))


@router.post(
    "/api/projects/{project}/agents/{agent_id}/feedback",
    status_code=201,
    response_model=Stored,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {JsonLines.media_type: {"schema": {"type": "string"}, "example": _LINES}},
        }
    },
)
async def take_in(request: Request, member: Member, agent_id: AgentId) -> dict[str, int]:
    """Store ratings and pairs from JSON lines or a JSON list, all or none. An export can be sent unchanged.

    `stored` counts rows with one `request` once.
    """
    content = await request.body()
    return await run_in_threadpool(_take_in, parts_of(request), member, agent_id, content)


@router.delete("/api/projects/{project}/raters/{rater}", response_model=Deletion)
def forget_rater(
    request: Request, member: Member, rater: Annotated[str, Path(max_length=64)]
) -> dict[str, Any]:
    """Delete every rating and late reward of a rater in this project, by the opaque id that an export shows.

    `trainedFrom` names the trainings that have read some of the ratings.
    """
    return _forget(parts_of(request), member.principal, member.project, rater)


@router.delete("/api/me/feedback", response_model=Deletion)
def forget_me(request: Request, caller: Annotated[Principal, Depends(principal_of)]) -> dict[str, Any]:
    """Delete every rating and late reward that the caller gave in the projects that they belong to.

    `trainedFrom` names the trainings that have read some of the ratings.
    """
    parts = parts_of(request)
    total: dict[str, Any] = {"deleted": 0, "lateRewards": 0, "trainedFrom": []}
    for one in parts.accounts.projects_of(caller):
        found = _forget(parts, caller, one.project, rater_of(parts, one, ""))
        total = {name: total[name] + found[name] for name in total}
    return total


def rater_of(parts: Parts, member: Membership, spoken_for: str) -> str:
    """Return the opaque id of a caller, or of the user that it speaks for."""
    return parts.accounts.pseudonym("rater", member.project, member.principal.subject, spoken_for)


def keep(parts: Parts, policy: str, new: Sequence[Rating]) -> tuple[KeptRating, ...]:
    """Store ratings, all or none, and return them; raises RegistryError, QuotaReached."""
    try:
        return parts.registry.add_ratings(policy, new, parts.quotas.of_ratings())
    except NoRoom as error:
        raise parts.quotas.reached("ratings" if error.bound == "ratings" else "feedback_mib") from error


def _given(
    request: Request, member: Membership, agent: str, body: NewFeedback | NewPair, key: str | None
) -> dict[str, Any]:
    parts = parts_of(request)
    rater = rater_of(parts, member, body.rater)
    rating = rating_of(body, project=member.project, rater=rater, request_key=key)
    (kept,) = keep(parts, _policy(member, agent), [rating])
    RATINGS.labels("call").inc()
    return {"id": kept.public_id, "agentId": agent, "createdAt": kept.created}


def _take_in(parts: Parts, member: Membership, agent: str, content: bytes) -> dict[str, int]:
    project = member.project
    new = [
        rating_of(row, project=project, rater=rater_of(parts, member, row.rater), request_key=row.request)
        for row in read_lines(content)
    ]
    if not new:
        return {"stored": 0}
    with audited(parts, member, "feedback import", agent, lines=len(new)):
        stored = len({one.number for one in keep(parts, _policy(member, agent), new)})
    RATINGS.labels("lines").inc(stored)
    return {"stored": stored}


def _policy(member: Membership, agent: str) -> str:
    return f"{member.project}/{agent}"


def _forget(parts: Parts, by: Principal, project: str, rater: str) -> dict[str, Any]:
    """Delete the feedback of a rater; returns the numbers of rows, and the trainings that used them.

    The audit is written first, so that it lacks no deletion if a database fails in between.
    """
    known = parts.registry.rating_numbers(project, rater)
    if not known and not parts.registry.feedback_count(project, rater):
        return {"deleted": 0, "lateRewards": 0, "trainedFrom": []}
    parts.accounts.run(
        lambda session, now: audit.note(
            session,
            now,
            by=by.subject,
            action="ratings deleted",
            project=project,
            subject=f"rater/{rater}",
            ratings=sum(map(len, known.values())),
            trained=[one["job"] for one in trained_from(session, project, known)],
        )
    )
    found = parts.registry.delete_ratings(project, rater)
    late = parts.registry.delete_feedback(project, rater)
    # Again: a training that began meanwhile has read them, too.
    trained = parts.accounts.look(lambda session: trained_from(session, project, found))
    return {"deleted": sum(map(len, found.values())), "lateRewards": late, "trainedFrom": trained}


MAX_REWARDS: Final = 1000


class LateReward(Body):
    """A reward for one step of an episode, counted from 0; several of a step add up.

    request: a key under which it is stored once, however often it comes.
    """

    episode: Annotated[Text, Field(min_length=1, max_length=MAX_EPISODE_ID_LENGTH)]
    step: Annotated[int, Field(ge=0, lt=2**53), NUMERIC]
    amount: Annotated[Number, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
    request: Key | None = None


class LateRewards(Body):
    """Late rewards. rater: the user that the caller speaks for."""

    model_config = example(rewards=[{"episode": "episode-1", "step": 4, "amount": 1.0}])

    rewards: Annotated[list[LateReward], Field(min_length=1, max_length=MAX_REWARDS)]
    rater: Short = ""


@router.post("/api/projects/{project}/agents/{agent_id}/late-rewards", status_code=201, response_model=Stored)
def take_late(request: Request, member: Member, agent_id: AgentId, body: LateRewards) -> dict[str, int]:
    """Store late rewards, all or none.

    The oldest of a rater give way beyond 250,000; beyond a million in all, of the project that has most.
    """
    parts = parts_of(request)
    parts.registry.add_feedback(
        f"{member.project}/{agent_id}",
        [(one.episode, one.step, one.amount) for one in body.rewards],
        caller=rater_of(parts, member, body.rater),
        request_keys=[one.request for one in body.rewards],
    )
    return {"stored": len(body.rewards)}


@router.get("/api/projects/{project}/agents/{agent_id}/late-rewards", response_class=JsonLines)
def late_rewards(
    request: Request,
    member: Member,
    agent_id: AgentId,
    after: After = 0,
    limit: Limit = MAX_EXPORTED,
) -> Response:
    """Return late rewards after number `after`, oldest first; continue with the last `number`.

    They include those that reached a server of the policy. An answer without a row is the end.
    """
    found = parts_of(request).registry.feedback(f"{member.project}/{agent_id}", after, limit)
    return JsonLines(as_lines(late_row(one) for one in found))
