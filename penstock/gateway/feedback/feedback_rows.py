"""Feedback as rows of names and values, and as JSON lines of them: what is exported, and what is taken in.

    {"prompt", "response", "score", …}       a score of a response
    {"prompt", "chosen", "rejected", …}      which of two responses is better
    {"episode", "step", "amount", …}         a reward that came late

The names are those that reward models are trained from, so that an export can be trained from as it is.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from penstock.gateway.feedback.opinion_bodies import FeedbackRow, PairRow
from penstock.gateway.frame.api_errors import ApiError, field_of
from penstock.registry.feedback import Feedback
from penstock.registry.ratings import KeptRating

MAX_ROWS: Final = 10_000
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
    """Return a late reward as a row."""
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
