"""Ratings of responses to prompts, by people or programs: feedback for a reward model.

A rating is a raw score on the scale of its source, or the statement that a response is better than another
response to the same prompt. Ratings are neither normalised nor discarded here.
"""

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, case, func, insert, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.orm import Session

from penstock.registry.models import RatingRow, RatingUsageRow, values
from penstock.registry.records import NoRoom, NotAllowed

# ---- Number and text size of the ratings of each project, updated with every change, to bound them.


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingBounds:
    """Bounds of a project. text_bytes: of prompts, responses and notes, as UTF-8."""

    ratings: int
    text_bytes: int


def count(session: Session, rows: Sequence[dict[str, Any]], bounds: RatingBounds | None) -> None:
    """Count rows that have just been stored; raises NoRoom where a project exceeds its bounds.

    Called last in a transaction, because other ratings of the project wait from here until it ends.
    """
    for project in sorted({row["project"] for row in rows} - {""}):
        own = [row["text_bytes"] for row in rows if row["project"] == project]
        ratings, text_bytes = _change(session, project, len(own), sum(own))
        if bounds is not None and ratings > bounds.ratings:
            raise NoRoom("ratings", bounds.ratings)
        if bounds is not None and text_bytes > bounds.text_bytes:
            raise NoRoom("text_bytes", bounds.text_bytes)


def discount(session: Session, project: str, ratings: int, text_bytes: int) -> None:
    if project and ratings:
        _change(session, project, -ratings, -text_bytes)


def _change(session: Session, project: str, ratings: int, text_bytes: int) -> tuple[int, int]:
    """Add to the counts of a project in one statement, and return the new counts."""
    row = RatingUsageRow
    changed = update(row).where(row.project == project)
    changed = changed.values(ratings=row.ratings + ratings, text_bytes=row.text_bytes + text_bytes)
    found = session.execute(changed.returning(row.ratings, row.text_bytes)).one_or_none()
    if found is not None:
        return found[0], found[1]
    session.add(RatingUsageRow(project=project, ratings=ratings, text_bytes=text_bytes))
    session.flush()  # the transaction is repeated where another one has inserted the row
    return ratings, text_bytes


MAX_KEY_LENGTH: Final = 64
_READ_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """One rating; exactly one of `score` and `rejected` is given.

    prompt: text, or the conversation so far as a list of {"role": …, "content": …}. rejected: the worse
    response. key: the aspect that is rated (`thumb`, `helpful`, `safe`, …). source: the author of the rating.
    conversation: its id at the source, may be "". version: of the policy that responded; None: unknown.
    project, run: where it belongs, may be "". rater: an opaque id, may be "". notes: a comment of the rater.
    request_key: a policy stores a rating with the same key once; None: always.
    """

    prompt: str | Sequence[dict[str, str]]
    response: str
    score: float | None = None
    rejected: str | None = None
    key: str = "overall"
    source: str = ""
    conversation: str = ""
    version: int | None = None
    project: str = ""
    run: str = ""
    rater: str = ""
    notes: str = ""
    request_key: str | None = None

    def __post_init__(self) -> None:
        if (self.score is None) == (self.rejected is None):
            raise ValueError(
                f"rating score={self.score} rejected={self.rejected!r}: give one of the two: a score, or "
                "the response that is worse"
            )
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(
                f"rating score={self.score}: must be finite; leave out a rating that was not given"
            )
        if not 1 <= len(self.key) <= MAX_KEY_LENGTH:
            raise ValueError(f"rating key={self.key[:80]!r}: must have 1 to {MAX_KEY_LENGTH} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRating:
    """A stored rating. number: rises, is never reused. public_id: random; "" for early ratings."""

    number: int
    public_id: str
    policy: str
    rating: Rating
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The rated conversations of a version.

    rated: number of conversations with a rating. well: number of those with a score above the given bound.
    """

    version: int
    rated: int
    well: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedConversation:
    """The newest score of a conversation. rater: who gave it. is_well: whether it is above the bound."""

    conversation: str
    rater: str
    is_well: bool


def prepared(policy: str, new: Sequence[Rating]) -> list[tuple[KeptRating, dict[str, Any]]]:
    """Return new ratings with their rows, made before the transaction, for which other writers wait."""
    now = datetime.now(UTC)
    kept = [
        KeptRating(number=0, public_id=secrets.token_hex(16), policy=policy, rating=one, created=now)
        for one in new
    ]
    return [(one, _row(one)) for one in kept]


def add(
    session: Session, new: Sequence[tuple[KeptRating, dict[str, Any]]], bounds: RatingBounds | None = None
) -> tuple[KeptRating, ...]:
    """Store ratings that are `prepared`, all or none; each `request_key` of a policy counts once.

    bounds: of each project. Raises NotAllowed for a key of another rating, NoRoom.
    """
    known, rows, kept = _known(session, new), list[dict[str, Any]](), list[KeptRating]()
    for one, row in new:
        key = one.rating.request_key
        same = one if key is None else known.setdefault(key, one)
        if same is one:
            rows.append(row)
        elif same.rating != one.rating:
            raise NotAllowed("this key came with another rating before: a new rating needs a key of its own")
        kept.append(same)
    numbers = dict[str, int]()
    if rows:
        inserted = insert(RatingRow).returning(RatingRow.public_id, RatingRow.number)
        numbers = dict(session.execute(inserted, rows).all())
        count(session, rows, bounds)
    return tuple(replace(one, number=numbers.get(one.public_id, one.number)) for one in kept)


def numbers_of(session: Session, project: str, rater: str) -> dict[str, list[int]]:
    """Return the numbers of a rater's ratings in a project, by policy."""
    found = dict[str, list[int]]()
    for policy, number in session.execute(
        select(RatingRow.policy, RatingRow.number).where(*_own(project, rater))
    ):
        found.setdefault(policy, []).append(number)
    return found


def delete(session: Session, project: str, rater: str) -> dict[str, list[int]]:
    """Delete all ratings of a rater in a project, and return their numbers, by policy."""
    found = numbers_of(session, project, rater)
    counted = select(func.count(), func.coalesce(func.sum(RatingRow.text_bytes), 0))
    number, text_bytes = session.execute(counted.where(*_own(project, rater))).one()
    discount(session, project, number, int(text_bytes))
    session.execute(sql_delete(RatingRow).where(*_own(project, rater)))
    return found


def tally(
    session: Session,
    policy: str,
    key: str,
    *,
    above: float,
    without: str | None = None,
    since: datetime | None = None,
) -> tuple[Tally, ...]:
    """Return the number of rated conversations of each version, and of those with a score above a bound.

    key: the aspect. above: the bound. The newest score of a conversation counts; a rating without a
    conversation counts as one. Lowest version first; ratings without a version, those of the source
    `without`, and those before `since`, are left out.
    """
    row = RatingRow
    own = _scored(policy, key, without) & row.version.is_not(None)
    own = own if since is None else own & (row.created >= since)
    alone = case((row.conversation == "", row.number), else_=0)
    newest = select(func.max(row.number)).where(own).group_by(row.version, row.conversation, alone)
    is_well = case((row.score > above, 1), else_=0)
    counted = select(row.version, func.count(), func.sum(is_well)).where(row.number.in_(newest))
    found = session.execute(counted.group_by(row.version).order_by(row.version))
    return tuple(Tally(version=version, rated=rated, well=well) for version, rated, well in found)


def rated_conversations(
    session: Session, policy: str, key: str, *, above: float, without: str | None = None
) -> tuple[RatedConversation, ...]:
    """Return the conversations that were rated in an aspect, of all versions, sorted by their ids."""
    row = RatingRow
    own = _scored(policy, key, without) & (row.conversation != "")
    newest = select(func.max(row.number)).where(own).group_by(row.conversation)
    found = select(row.conversation, row.rater, row.score > above).where(row.number.in_(newest))
    return tuple(
        RatedConversation(conversation=conversation, rater=rater, is_well=bool(is_well))
        for conversation, rater, is_well in session.execute(found.order_by(row.conversation))
    )


def read(
    session: Session,
    policy: str | None = None,
    after: int = 0,
    limit: int = 1000,
    *,
    most_chars: int | None = None,
) -> tuple[KeptRating, ...]:
    """Return ratings after number `after`, oldest first, at most `limit`.

    policy: None: all policies. most_chars: most characters of their texts together; the first rating is
    returned whatever its size.
    """
    wanted = select(RatingRow).where(RatingRow.number > after)
    if policy is not None:
        wanted = wanted.where(RatingRow.policy == policy)
    wanted = wanted.order_by(RatingRow.number).limit(limit)
    if most_chars is None:
        return tuple(map(_record, session.scalars(wanted)))
    found, chars = list[KeptRating](), 0
    for row in session.scalars(wanted.execution_options(yield_per=_READ_AT_ONCE)):
        chars += len(str(row.prompt)) + len(row.response) + len(row.rejected or "") + len(row.notes)
        if found and chars > most_chars:
            break
        found.append(_record(row))
    return tuple(found)


def _scored(policy: str, key: str, without: str | None) -> ColumnElement[bool]:
    row = RatingRow
    own = (row.policy == policy) & (row.key == key) & row.score.is_not(None)
    return own if without is None else own & (row.source != without)


def _own(project: str, rater: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return RatingRow.project == project, RatingRow.rater == rater


def _known(session: Session, new: Sequence[tuple[KeptRating, dict[str, Any]]]) -> dict[str, KeptRating]:
    """Return the stored ratings that have keys of new ones, by key."""
    keys = sorted({one.rating.request_key for one, _ in new if one.rating.request_key is not None})
    same = RatingRow.policy.in_({one.policy for one, _ in new}) & RatingRow.request_key.in_(keys)
    return {str(row.request_key): _record(row) for row in session.scalars(select(RatingRow).where(same))}


def _row(kept: KeptRating) -> dict[str, Any]:
    rating, prompt = kept.rating, kept.rating.prompt
    if not isinstance(prompt, str):
        prompt = [dict(turn) for turn in prompt]
    texts = (
        prompt if isinstance(prompt, str) else json.dumps(prompt),
        *(rating.response, rating.rejected or "", rating.notes),
    )
    own = {"policy": kept.policy, "public_id": kept.public_id, "created": kept.created}
    size = sum(len(text.encode()) for text in texts)
    return values(Rating, rating) | own | {"prompt": prompt, "text_bytes": size}


def _record(row: RatingRow) -> KeptRating:
    return KeptRating(
        number=row.number,
        public_id=row.public_id,
        policy=row.policy,
        rating=Rating(**values(Rating, row)),
        created=row.created,
    )
