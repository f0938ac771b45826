"""A filter of ratings: it returns the rows that count, and the reason and rater of every other row.

    rows ─► without deleted raters ─► newest per rater and answer ─► daily cap ─► without liars ─► rows

Rows are ordered by the `number` of a registry where every row has its own, since clocks go back; elsewhere by
`at_s`, in seconds. A row without `at_s` is ordered by its place among the others.
"""

import json
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.people import THUMB
from penstock.workloads.language.feedback import BadRows, made_of, rows_of
from penstock.workloads.language.prompt import identity, parse_prompt

# ---- The rules of the filter, and the reasons for which it drops a row.


class Reason(StrEnum):
    """Why a row does not count."""

    DELETED = "deleted"
    REPEATED = "repeated"
    OVER_CAP = "over_cap"
    LIAR = "liar"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingRules:
    """Numbers of the filter.

    daily_cap: most rows of a person that count in 24 hours. false_alarms: bound of the chance that any honest
    person is taken for a liar.

    Raises ConfigurationError that names an invalid number.
    """

    daily_cap: int = 200
    false_alarms: float = 0.01

    def __post_init__(self) -> None:
        if self.daily_cap < 1:
            raise ConfigurationError(f"daily_cap={self.daily_cap}: must be at least 1")
        if not 0 < self.false_alarms < 1:
            raise ConfigurationError(f"false_alarms={self.false_alarms}: must lie between 0 and 1")


# ---- A sequential test for raters who contradict others; it may be read after every thumb.

_ADDED: Final = 2.0
"""Weight of the overall mean in a response's share, in thumbs."""
_LEAST: Final = 10
"""Fewest thumbs by which a person is judged."""
SURE: Final = 0.1
"""Least distance of others' share from 0 and 1: a single thumb is weak evidence."""

Row = Mapping[str, Any]
Expected = Callable[[Row], float | None]
"""Returns the chance of a thumb up by others for a row's response; None: unknown."""


def liars(thumbs: Sequence[tuple[str, bool, float]], rules: RatingRules) -> dict[str, float]:
    """Return the log of the evidence of each rater above the bound. thumbs: rater, is up, others' chance."""
    evidence: dict[str, float] = {}
    worst: dict[str, float] = {}
    count: dict[str, int] = {}
    for rater, is_up, chance in thumbs:
        sure = min(max(chance, SURE), 1 - SURE)
        odds = math.log(sure / (1 - sure))
        evidence[rater] = evidence.get(rater, 0.0) + (-odds if is_up else odds)
        count[rater] = count.get(rater, 0) + 1
        if count[rater] >= _LEAST:
            worst[rater] = max(worst.get(rater, -math.inf), evidence[rater])
    bound = math.log(max(len(count), 1) / rules.false_alarms)
    return {rater: found for rater, found in worst.items() if found > bound}


def others_share(rows: Sequence[tuple[str, str, bool]]) -> Callable[[str, str], float]:
    """Return a function of rater and response: the share of thumbs up by other raters.

    rows: rater, response, whether the thumb is up. The overall mean counts as some further thumbs, so that
    without other ratings the share is that mean.
    """
    ups: dict[str, float] = {}
    counts: dict[str, int] = {}
    own: dict[tuple[str, str], tuple[float, int]] = {}
    for rater, response, is_up in rows:
        ups[response] = ups.get(response, 0.0) + is_up
        counts[response] = counts.get(response, 0) + 1
        up, count = own.get((rater, response), (0.0, 0))
        own[rater, response] = up + is_up, count + 1
    mean = sum(ups.values()) / max(sum(counts.values()), 1)

    def share(rater: str, response: str) -> float:
        up, count = own.get((rater, response), (0.0, 0))
        others = counts.get(response, 0) - count
        return (ups.get(response, 0.0) - up + _ADDED * mean) / (others + _ADDED)

    return share


DAY_S: Final = 86_400.0


@dataclass(slots=True)
class Filtered:
    """The result of the filter.

    kept: rows that count, in their order. dropped: counts by reason. raters: counts by rater and reason.
    unnamed: number of rows without a rater. evidence: of each liar, the log of the likelihood ratio of lying.
    """

    kept: list[Row] = field(default_factory=list)
    dropped: Counter[Reason] = field(default_factory=Counter)
    raters: dict[str, Counter[Reason]] = field(default_factory=dict)
    unnamed: int = 0
    evidence: dict[str, float] = field(default_factory=dict)

    def drop(self, rater: str, reason: Reason) -> None:
        self.dropped[reason] += 1
        self.raters.setdefault(rater, Counter())[reason] += 1


def filter_ratings(
    rows: Sequence[Row],
    rules: RatingRules,
    *,
    deleted: Collection[str] = (),
    expected: Expected | None = None,
) -> Filtered:
    """Return the rows that count, and why the others do not.

    deleted: raters whose rows are dropped. expected: the chance of a thumb up for a row's response, such as a
    reward model's; None: the share of the other raters in these rows. Only thumbs are compared with others.
    """
    found = Filtered()
    named = _without_gone(rows, deleted, found)
    counted = _within_cap(_newest(named, found), rules, found)
    found.evidence = liars(_thumbs(counted, expected), rules)
    for row in counted:
        if (rater := _rater(row)) in found.evidence:
            found.drop(rater, Reason.LIAR)
        else:
            found.kept.append(row)
    return found


def _without_gone(rows: Sequence[Row], deleted: Collection[str], found: Filtered) -> list[Row]:
    gone, kept = frozenset(deleted), []
    for row in rows:
        rater = _rater(row)
        found.unnamed += not rater
        if rater and rater in gone:
            found.drop(rater, Reason.DELETED)
        else:
            kept.append(row)
    return kept


def _oldest_first(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    placed = list(enumerate(rows))
    numbers = [row.get("number") for row in rows]
    if all(type(one) is int for one in numbers) and len(set(numbers)) == len(numbers):
        return sorted(placed, key=lambda one: int(one[1]["number"]))
    return sorted(placed, key=lambda one: _time(one[1], one[0]))


def _newest(rows: Sequence[Row], found: Filtered) -> list[Row]:
    newest = {key: place for place, row in _oldest_first(rows) if (key := _about(row)) is not None}
    kept = []
    for place, row in enumerate(rows):
        key = _about(row)
        if key is None or newest[key] == place:
            kept.append(row)
        else:
            found.drop(_rater(row), Reason.REPEATED)
    return kept


def _within_cap(rows: Sequence[Row], rules: RatingRules, found: Filtered) -> list[Row]:
    recent: dict[str, deque[float]] = {}
    over: set[int] = set()
    for place, row in _oldest_first(rows):
        rater, now = _rater(row), _time(row, place)
        if not rater:
            continue
        times = recent.setdefault(rater, deque())
        while times and abs(now - times[0]) >= DAY_S:  # also where a clock was ahead, and went back
            times.popleft()
        if len(times) >= rules.daily_cap:
            over.add(place)
            found.drop(rater, Reason.OVER_CAP)
        else:
            times.append(now)
    return [row for place, row in enumerate(rows) if place not in over]


def _thumbs(rows: Sequence[Row], expected: Expected | None) -> list[tuple[str, bool, float]]:
    """Return rater, whether the thumb is up, and the chance of a thumb up by others, oldest first."""
    given = [
        row
        for _, row in _oldest_first(rows)
        if row.get("key") == THUMB and _rater(row) and row.get("score") in (True, False, 1, -1)
    ]
    if expected is not None:
        known = [(row, expected(row)) for row in given]
        return [(_rater(row), _is_up(row), chance) for row, chance in known if chance is not None]
    share = others_share([(_rater(row), _response(row), _is_up(row)) for row in given])
    return [(_rater(row), _is_up(row), share(_rater(row), _response(row))) for row in given]


def _about(row: Row) -> tuple[str, ...] | None:
    """Return the rater and the rated answer; None for a row without a rater."""
    rater = _rater(row)
    if not rater:
        return None
    if row.get("chosen") is not None:
        both = sorted((str(row.get("chosen")), str(row.get("rejected"))))
        return (rater, "", _prompt(row), *both)
    return (rater, str(row.get("key")), _prompt(row), str(row.get("response")))


def _response(row: Row) -> str:
    return f"{_prompt(row)}\n{row.get('response')}"


def _prompt(row: Row) -> str:
    try:
        return identity(parse_prompt(row.get("prompt")))
    except ValueError:
        return repr(row.get("prompt"))  # the training reports what is wrong with it


def _is_up(row: Row) -> bool:
    return row["score"] in (True, 1)


def _rater(row: Row) -> str:
    return str(row.get("rater") or "")


def _time(row: Row, place: int) -> float:
    at_s = row.get("at_s")
    if not isinstance(at_s, int | float) or isinstance(at_s, bool):
        return float(place)
    # NaN is neither older nor newer than anything, and whole numbers of JSON have no end.
    return float(at_s) if abs(at_s) <= sys.float_info.max else float(place)


# ---- `penstock chat ratings`: read, filter and write rows, and report them.

SHOWN: Final = 20
"""Most raters that the summary names; JSON has all."""


def write_believed(
    file: str,
    output: Path,
    rules: RatingRules,
    *,
    part: str | None,
    deleted: Path | None,
    judge: Path | None,
    base: str | None,
    as_json: bool,
) -> list[str]:
    """Write the rows of a place that count, and return the report, line by line."""
    rows, bad = _read(file, part)
    found = filter_ratings(rows, rules, deleted=_names(deleted), expected=_judge(judge, base, rows))
    written = b"".join(_line(row) for row in found.kept)  # before the file is touched, which may be the input
    try:
        output.write_bytes(written)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: {error.strerror}") from error
    told = _told(found, len(rows), bad)
    return [json.dumps(told)] if as_json else _lines(told, output)


def _read(place: str, part: str | None) -> tuple[list[dict[str, Any]], BadRows]:
    bad = BadRows()
    rows = list(made_of(rows_of(place, part), bad, _rating))
    if not rows:
        raise ConfigurationError("\n".join([f"feedback={place}: no row can be used", *bad.lines()]))
    return rows, bad


def _rating(_where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that is a rating; raises ValueError that names what it lacks."""
    if row.get("prompt") is None:
        raise ValueError("prompt: is missing")
    names = ("chosen", "rejected") if row.get("chosen") is not None else ("response",)
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name}={row.get(name)!r:.80}: must be a text")  # noqa: TRY004 - a bad row
    if names == ("response",) and not isinstance(row.get("score"), bool | int | float):
        raise ValueError(f"score={row.get('score')!r:.80}: must be a number, true or false")
    return dict(row)


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(dict(row), ensure_ascii=False)}\n".encode()


def _names(file: Path | None) -> frozenset[str]:
    if file is None:
        return frozenset()
    try:
        return frozenset(line.strip() for line in file.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--deleted {file}: cannot be read: {error}") from error


def _judge(judge: Path | None, base: str | None, rows: Sequence[dict[str, Any]]) -> Expected | None:
    """Return the expectations of a reward model for the rows; None for rows that it cannot read."""
    if judge is None:
        return None
    from penstock.workloads.language.reward.reward_model import HeadsModel  # noqa: PLC0415 - with torch
    from penstock.workloads.language.reward.reward_source import BadSample, Sample  # noqa: PLC0415 - with torch
    from penstock.workloads.language.settings import quieten  # noqa: PLC0415 - with torch

    quieten()
    model = HeadsModel.load(judge, base=base)
    if THUMB not in [one.name for one in model.heads]:
        raise ConfigurationError(f"--judge {judge}: has no head {THUMB!r}")
    known: dict[int, float] = {}
    for row in rows:
        if row.get("key") == THUMB and isinstance(row.get("response"), str):
            try:
                sample = Sample(prompt=parse_prompt(row.get("prompt")), response=row["response"])
                [said] = model.judge([sample])
            except (BadSample, ValueError):
                continue  # a training on the row reports what is wrong with it
            known[id(row)] = said.shares[THUMB]
    return lambda row: known.get(id(row))


def _told(found: Filtered, count: int, bad: BadRows) -> dict[str, Any]:
    return {
        "rows": count,
        "kept": len(found.kept),
        "dropped": {reason.value: number for reason, number in sorted(found.dropped.items())},
        "raters": {
            rater: {reason.value: number for reason, number in sorted(reasons.items())}
            for rater, reasons in sorted(found.raters.items())
        },
        "evidence": {rater: round(one, 2) for rater, one in sorted(found.evidence.items())},
        "unnamed": found.unnamed,
        "bad": bad.count,
        "unreadable": bad.lines(),
    }


def _lines(told: dict[str, Any], output: Path) -> list[str]:
    dropped = ", ".join(f"{number} {reason}" for reason, number in told["dropped"].items()) or "none"
    people = [
        f"  {rater}: " + ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        for rater, reasons in told["raters"].items()
    ]
    rest = len(people) - SHOWN
    return [
        f"{output}: {told['kept']} of {told['rows']} rows count; dropped: {dropped}",
        *people[:SHOWN],
        *([f"  … and {rest} more people; --json names all"] if rest > 0 else []),
        f"{told['unnamed']} rows name no rater, and are not compared with others",
        *([f"{told['bad']} rows are no ratings:"] if told["bad"] else []),
        *told["unreadable"],
    ]
