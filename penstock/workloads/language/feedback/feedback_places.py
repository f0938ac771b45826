"""Rows of feedback from where they lie, each with the words that name it.

FILE.jsonl, .json, .ndjson     an object per line
FILE.parquet                   columns
FOLDER                         a Hugging Face dataset as `save_to_disk` writes it
sqlite:///…, postgresql://…    the ratings of a registry
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config.settings import ConfigurationError
from penstock.registry.ratings import KeptRating
from penstock.registry.records import RegistryError
from penstock.registry.registry import Registry
from penstock.workloads.language.feedback.examples import BadRows, Example, Scale, to_example

Row = tuple[str, Any]
"""Where it lies, and what is there: a mapping, or a ValueError for what cannot be read."""

LINES: Final = (".jsonl", ".json", ".ndjson")
MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_PAGE: Final = 1000


def rows_of(place: str, part: str | None = None) -> Iterator[Row]:
    """Return the rows at a place. part: a split of a dataset, or a policy of a registry."""
    if "://" in place:
        return _ratings(place, part)
    path = Path(place)
    if not path.exists():
        raise ConfigurationError(f"feedback={place}: no such file or folder")
    if path.is_dir():
        return _dataset(path, part)
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".parquet": _parquet,
        **dict.fromkeys(LINES, _lines),
    }
    if path.suffix not in readers:
        raise ConfigurationError(
            f"feedback={place}: use {', '.join(LINES)}, .parquet, a dataset's folder, or a registry's URL"
        )
    if part is not None:
        raise ConfigurationError(f"--part {part!r}: {place} has no parts")
    return readers[path.suffix](path)


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if line.strip():
                yield f"{path.name} line {number}", _object(line)


def _object(line: bytes) -> Any:
    if len(line) > MAX_LINE_BYTES:
        return ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"no JSON: {error}")
    return value if isinstance(value, dict) else ValueError(f"holds {type(value).__name__}, not an object")


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - needed for such files only

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_PAGE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", row
    except (ArrowException, OSError) as error:
        raise ConfigurationError(f"feedback={path}: no Parquet file: {error}") from error


def _dataset(path: Path, part: str | None) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 - needed for such folders only

    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigurationError(f"feedback={path}: no dataset that `save_to_disk` wrote: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = part or "train"
        if name not in loaded:
            raise ConfigurationError(
                f"feedback={path}: no split {name!r}; --part takes one of {', '.join(loaded)}"
            )
        loaded = loaded[name]
    elif part is not None:
        raise ConfigurationError(f"--part {part!r}: {path} has no splits")
    for number, row in enumerate(loaded, start=1):
        yield f"{path.name} row {number}", row


def _ratings(url: str, policy: str | None) -> Iterator[Row]:
    try:
        with Registry.read(url) as registry:
            after = 0
            while page := registry.ratings(policy, after=after, limit=_PAGE):
                after = page[-1].number
                for kept in page:
                    yield f"rating {kept.number}", rating_row(kept)
    except (RegistryError, ValueError) as error:
        raise ConfigurationError(f"feedback={url.partition('://')[0]}://…: {error}") from error


def rating_row(kept: KeptRating) -> dict[str, Any]:
    """Return a rating of a registry as files have it. number: rises, whatever clocks do; at_s: Unix."""
    rating = kept.rating
    row: dict[str, Any] = {
        "prompt": rating.prompt,
        "key": rating.key,
        "at_s": kept.created.timestamp(),
        "number": kept.number,
    }
    if rating.rater:
        row["rater"] = rating.rater
    if rating.rejected is not None:
        return {**row, "chosen": rating.response, "rejected": rating.rejected}
    return {**row, "response": rating.response, "score": rating.score}


# ---- Reads feedback from a place into examples.

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
