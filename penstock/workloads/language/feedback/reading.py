"""Reads feedback from a place into examples.

What cannot be used is counted and named, never dropped in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import BadRows, Example, to_example
from penstock.workloads.language.feedback.feedback_places import rows_of
from penstock.workloads.language.feedback.scale import Scale

COLUMNS: Final = ("prompt", "response", "score", "chosen", "rejected", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Feedback as a user names it.

    part: split of a dataset or policy of a registry. key: take rows that rate this (`helpful`); None: all,
    which must rate one thing. columns: our name to that of the file, for files that call them differently.
    """

    place: str
    scale: Scale
    part: str | None = None
    key: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What was found. other_key: rows that rate something else than the key that was asked for."""

    examples: tuple[Example, ...]
    bad: BadRows
    other_key: int = 0


def read(source: Source) -> Feedback:
    """Return all examples of a source, in its order.

    Raises ConfigurationError for a place that cannot be read, rows that rate several things, or no good row.
    """
    _check_columns(source.columns)
    examples: list[Example] = []
    bad, other_key, keys = BadRows(), 0, set[str]()
    for where, row in rows_of(source.place, source.part):
        try:
            if isinstance(row, ValueError):
                raise row
            named = {**row, **{ours: row.get(theirs) for ours, theirs in source.columns.items()}}
            key = _key(named)
            if source.key is not None and key != source.key:
                other_key += 1
                continue
            examples.append(to_example(named, source.scale, where))
            keys.add(key)
        except ValueError as error:
            bad.add(where, str(error))
    _check(source, examples, bad, other_key, keys)
    return Feedback(tuple(examples), bad, other_key)


def _key(row: Mapping[str, Any]) -> str:
    key = row.get("key")
    if key is not None and not isinstance(key, str):
        raise ValueError(f"key={key!r} is no text")
    return key or ""


def _check(source: Source, examples: list[Example], bad: BadRows, other_key: int, keys: set[str]) -> None:
    if not examples:
        found = "\n".join([f"feedback={source.place}: no row can be used", *bad.lines()])
        wrong = f"\n{other_key} rows rate something else than --key {source.key}" if other_key else ""
        raise ConfigurationError(found + wrong)
    if len(keys) > 1:
        names = ", ".join(sorted(key or "(none)" for key in keys))
        raise ConfigurationError(f"feedback={source.place}: rows rate {names}; choose one with --key")


def _check_columns(columns: Mapping[str, str]) -> None:
    for name in columns:
        if name not in COLUMNS:
            raise ConfigurationError(f"--column {name}=…: use one of {', '.join(COLUMNS)}")
