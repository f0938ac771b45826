"""Feedback as rows of names and values, and as JSON lines of them: what is exported, and what is taken in.

    {"prompt", "response", "score", …}       a score of a response
    {"prompt", "chosen", "rejected", …}      which of two responses is better
    {"episode", "step", "amount", …}         a reward that came late

The names are those that reward models are trained from, so that an export can be trained from as it is.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from penstock.gateway.frame.api_errors import ApiError, field_of
from penstock.gateway.frame.requests import NUMERIC, Body, Number, Text, example
from penstock.registry.feedback import Feedback
from penstock.registry.ratings import KeptRating, Rating
from penstock.registry.registry import Registry

# ---- What a request says of responses: a score of one, or which of two is the better one.

MAX_TEXT: Final = 200_000

AgentId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,38}$")]
Key = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")]
Short = Annotated[Text, Field(max_length=64)]
Long = Annotated[Text, Field(min_length=1, max_length=MAX_TEXT)]
Notes = Annotated[Text, Field(max_length=MAX_TEXT)]
Score = Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]


class PromptAnswered(Body):
    """A prompt, and where it was answered.

    runId: the run of the caller's own that the answer came from. key: the aspect that is rated. conversation:
    its id at the caller's. version: of the policy that responded.
    """

    prompt: Long
    runId: Short = ""  # noqa: N815 - as callers of the service know it
    key: Annotated[Text, Field(min_length=1, max_length=64)] = "overall"
    version: Annotated[int, Field(ge=1, lt=2**63), NUMERIC] | None = None
    conversation: Annotated[Text, Field(max_length=128)] = ""


class RatedResponse(PromptAnswered):
    """A response to a prompt."""

    response: Long


class Opinion(Body):
    """A score from 0 to 1, a number and no word for one, and what may be said beside it."""

    score: Score
    notes: Notes = ""


class NewFeedback(RatedResponse, Opinion):
    """A response and what somebody thinks of it.

    rater: the user whom the caller speaks for; only an opaque id of them is stored.
    """

    model_config = example(prompt="2 + 2?", response="4", score=0.9, runId="run-1", notes="right")

    rater: Short = ""


class NewPair(PromptAnswered):
    """Two responses to a prompt, of which somebody prefers one.

    chosen: the better one; `version` is of the policy that gave it. rejected: the other one. rater: the user
    whom the caller speaks for; only an opaque id of them is stored.
    """

    model_config = example(prompt="2 + 2?", chosen="4", rejected="5")

    chosen: Long
    rejected: Long
    notes: Notes = ""
    rater: Short = ""

    @field_validator("rejected")
    @classmethod
    def _differs(cls, rejected: str, said: ValidationInfo) -> str:
        if rejected == said.data.get("chosen"):
            raise ValueError("must differ from `chosen`: of two responses that are the same none is better")
        return rejected


class FeedbackRow(NewFeedback):
    """A row of an import. request: a key under which it is stored once, however often it comes."""

    request: Key | None = None


class PairRow(NewPair):
    """A row of an import. request: a key under which it is stored once, however often it comes."""

    request: Key | None = None


def rating_of(body: NewFeedback | NewPair, *, project: str, rater: str, request_key: str | None) -> Rating:
    """Return what a body says as the registry keeps it.

    rater: opaque id of who said it. request_key: under which it is stored once, or None.
    """
    said: dict[str, Any] = (
        {"response": body.chosen, "rejected": body.rejected}
        if isinstance(body, NewPair)
        else {"response": body.response, "score": body.score}
    )
    return Rating(
        **said,
        prompt=body.prompt,
        key=body.key,
        version=body.version,
        conversation=body.conversation,
        project=project,
        run=body.runId,
        rater=rater,
        notes=body.notes,
        request_key=request_key,
    )


MAX_ROWS: Final = 10_000
_PAGE_OF_ROWS: Final = 1000
_PAGE_OF_CHARS: Final = 4_000_000
ONLY_EXPORTED: Final = frozenset({"number", "id", "createdAt", "raterId"})
"""What an import leaves out: it is made anew where the rows are taken in."""


def rating_row(kept: KeptRating) -> dict[str, Any]:
    """Return a rating as a row: a score with its response, a pair with both of its own."""
    rating = kept.rating
    said = (
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
        **said,
        "runId": rating.run,
        "notes": rating.notes,
        "key": rating.key,
        "version": rating.version,
        "conversation": rating.conversation,
        "request": rating.request_key,
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
    """Return rows as JSON lines; a time as ISO 8601 has it."""
    return "".join(f"{json.dumps(row, default=datetime.isoformat)}\n" for row in rows)


def read_lines(content: bytes) -> Iterator[FeedbackRow | PairRow]:
    """Yield the rows in JSON lines; raises ApiError, which names the first wrong line from 1."""
    lines = content.splitlines()
    if len(lines) > MAX_ROWS:
        raise ApiError(413, f"{len(lines)} lines: send at most {MAX_ROWS} at a time")
    for number, line in enumerate(lines, 1):
        try:
            yield _row(json.loads(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = field_of(first["loc"])
            raise ApiError(422, f"line {number}: {field}: {first['msg']}", field=field) from error
        except (ValueError, RecursionError) as error:
            raise ApiError(422, f"line {number}: not JSON") from error


def _row(said: Any) -> FeedbackRow | PairRow:
    """Return a row; raises ValidationError. What is null is left out, as if it had not been said."""
    if not isinstance(said, dict):
        return FeedbackRow.model_validate(said)
    known = {key: value for key, value in said.items() if key not in ONLY_EXPORTED}
    if known.get("chosen") is None and known.get("rejected") is None:
        return FeedbackRow.model_validate(_without(known, ("chosen", "rejected")))
    return PairRow.model_validate(_without(known, ("response", "score")))


def _without(row: dict[str, Any], columns: tuple[str, str]) -> dict[str, Any]:
    """Leave out columns of the other kind of row that say nothing, as a table of both kinds has them."""
    return {key: value for key, value in row.items() if key not in columns or value is not None}


def ratings_of(registry: Registry, policy: str) -> Iterator[KeptRating]:
    """Yield all ratings of `PROJECT/AGENT`, oldest first; a few megabytes are in memory at a time."""
    number = 0
    while page := registry.ratings(policy, number, _PAGE_OF_ROWS, most_chars=_PAGE_OF_CHARS):
        yield from page
        number = page[-1].number
