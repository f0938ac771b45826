"""Feedback of several kinds as what a network of several heads learns from.

A row has `prompt` and `response` with `key` and `score`, or `prompt`, `chosen` and `rejected`; `rater` says
whose it is. What one rater said of one response is put together, so that it is read once by the network.
What cannot be used is counted and named.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import BadRows, Preference, response_of
from penstock.workloads.language.feedback.feedback_places import Row, rows_of
from penstock.workloads.language.feedback.split import place_of
from penstock.workloads.language.heads.head import Head
from penstock.workloads.language.prompt import Prompt, identity, parse_prompt


@dataclass(slots=True, kw_only=True)
class Judged:
    """What one rater said of a response. shares: 0 to 1, by head; heads without one are left out."""

    prompt: Prompt
    response: str
    where: str
    shares: dict[str, float] = field(default_factory=dict)


Opinion = Judged | Preference


@dataclass(frozen=True, slots=True)
class Opinions:
    """What was found. other_key: rows that rate what no head is for."""

    given: tuple[Opinion, ...]
    bad: BadRows
    other_key: int = 0


class Sides(NamedTuple):
    """Opinions to learn from, and others, about other prompts, to measure on."""

    train: list[Opinion]
    validation: list[Opinion]


def read_opinions(place: str, heads: Sequence[Head], part: str | None = None) -> Opinions:
    """Return the opinions at a place of feedback.

    part: split of a dataset or policy of a registry. Raises ConfigurationError for a place that cannot be
    read, or that has no row for any of the heads.
    """
    found = to_opinions(rows_of(place, part), heads)
    if not found.given:
        lines = "\n".join([f"feedback={place}: no row can be used", *found.bad.lines()])
        names = ", ".join(one.name for one in heads)
        other = f"\n{found.other_key} rows rate something else than {names}" if found.other_key else ""
        raise ConfigurationError(lines + other)
    return found


def to_opinions(rows: Iterable[Row], heads: Sequence[Head]) -> Opinions:
    """Return the opinions in rows, each with the words that name it."""
    by_name = {one.name: one for one in heads}
    bad, other_key = BadRows(), 0
    given: list[Opinion] = []
    of_rater: dict[tuple[str, str, str], Judged] = {}
    for where, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            prompt = parse_prompt(row.get("prompt"))
            if row.get("chosen") is not None or row.get("rejected") is not None:
                given.append(_preference(row, prompt, where))
                continue
            head = by_name.get(row.get("key") or "")
            if head is None:
                other_key += 1
                continue
            if row.get("score") is None:
                raise ValueError("no score")  # noqa: TRY301 - counted with the other bad rows
            share, response = head.share(row.get("score")), response_of(row, "response")
        except ValueError as error:
            bad.add(where, str(error))
            continue
        # Without a rater it is unknown whether two rows are of one person.
        whose = str(row.get("rater") or where)
        key = (whose, identity(prompt), response)
        if key not in of_rater:
            of_rater[key] = Judged(prompt=prompt, response=response, where=where)
            given.append(of_rater[key])
        of_rater[key].shares[head.name] = share
    return Opinions(tuple(given), bad, other_key)


def split(opinions: Sequence[Opinion], *, share: float, seed: int) -> Sides:
    """Return about `share` of the prompts, with all that was said of them, for validation; 0: none."""
    sides = Sides([], [])
    border = int(share * 2**64)
    for one in opinions:
        place = int.from_bytes(place_of(identity(one.prompt), seed)[:8], "big")
        (sides.validation if place < border else sides.train).append(one)
    return sides


def _preference(row: Mapping[str, Any], prompt: Prompt, where: str) -> Preference:
    chosen, rejected = response_of(row, "chosen"), response_of(row, "rejected")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, where=where)
