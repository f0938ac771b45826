"""What a request says of responses: a score of one, or which of two is the better one."""

from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import Field, ValidationInfo, field_validator

from penstock.gateway.frame.request_numbers import NUMERIC, Number
from penstock.gateway.frame.request_text import Body, Text, example
from penstock.registry.ratings import Rating

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
