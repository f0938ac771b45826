"""`penstock chat ratings`: rows read, filtered, written, and what is told of them."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.workloads.chat.people import THUMB
from penstock.workloads.chat.ratings import Expected, Filtered, RatingRules, filter_ratings
from penstock.workloads.language.feedback import BadRows, rows_of
from penstock.workloads.language.prompt import parse_prompt

SHOWN: Final = 20
"""Most people who are named in the summary; JSON has all."""


def main(
    file: str,
    output: Path,
    *,
    part: str | None,
    deleted: Path | None,
    daily_cap: int,
    false_alarms: float,
    judge: Path | None,
    base: str | None,
    as_json: bool,
) -> int:
    rules = RatingRules(daily_cap=daily_cap, false_alarms=false_alarms)
    rows, bad = _read(file, part)
    gone = _names(deleted)
    found = filter_ratings(rows, rules, deleted=gone, expected=_judge(judge, base, rows))
    written = b"".join(_line(row) for row in found.kept)  # before the file is touched, which may be the input
    try:
        output.write_bytes(written)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: {error.strerror}") from error
    told = _told(found, len(rows), bad)
    sys.stdout.write(json.dumps(told) + "\n" if as_json else "\n".join(_lines(told, output)) + "\n")
    return EXIT_OK


def _read(place: str, part: str | None) -> tuple[list[dict[str, Any]], BadRows]:
    rows, bad = [], BadRows()
    for where, row in rows_of(place, part):
        if isinstance(row, ValueError):
            bad.add(where, str(row))
        elif why := _why_no_rating(row):
            bad.add(where, why)
        else:
            rows.append(dict(row))
    if not rows:
        raise ConfigurationError("\n".join([f"feedback={place}: no row can be used", *bad.lines()]))
    return rows, bad


def _why_no_rating(row: Mapping[str, Any]) -> str:
    """Return what a row lacks to be a rating, "" where it is one."""
    if row.get("prompt") is None:
        return "prompt: is missing"
    wanted = ("chosen", "rejected") if row.get("chosen") is not None else ("response",)
    for name in wanted:
        if not isinstance(row.get(name), str):
            return f"{name}={row.get(name)!r:.80}: must be a text"
    if wanted == ("response",) and not isinstance(row.get("score"), bool | int | float):
        return f"score={row.get('score')!r:.80}: must be a number, true or false"
    return ""


def _line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line. Half a character, which JSON can say and UTF-8 cannot, stays an escape."""
    try:
        return f"{json.dumps(dict(row), ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(dict(row))}\n".encode()


def _names(file: Path | None) -> frozenset[str]:
    if file is None:
        return frozenset()
    try:
        return frozenset(line.strip() for line in file.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--deleted {file}: cannot be read: {error}") from error


def _judge(judge: Path | None, base: str | None, rows: Sequence[dict[str, Any]]) -> Expected | None:
    """Return what a model says of the rows' responses; there is nothing for those that it cannot read."""
    if judge is None:
        return None
    from penstock.workloads.language.reward.reward_model import HeadsModel
    from penstock.workloads.language.reward.reward_source import BadSample, Sample
    from penstock.workloads.language.settings import quieten

    quieten()
    model = HeadsModel.load(judge, base=base)
    if THUMB not in [one.name for one in model.card.heads]:
        raise ConfigurationError(f"--judge {judge}: has no head {THUMB!r}")
    known: dict[int, float] = {}
    for row in rows:
        if row.get("key") == THUMB and isinstance(row.get("response"), str):
            try:
                sample = Sample(prompt=parse_prompt(row.get("prompt")), response=row["response"])
                [said] = model.judge([sample])
            except (BadSample, ValueError):
                continue  # a training from the row says what is wrong with it
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
        f"{told['unnamed']} rows name no rater: nothing is known of who sent them",
        *([f"{told['bad']} rows are no ratings:"] if told["bad"] else []),
        *told["unreadable"],
    ]
