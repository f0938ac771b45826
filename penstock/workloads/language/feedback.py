"""Feedback: rows of a file, folder or registry as examples, and a split without a prompt on both sides.

FILE.jsonl, .json, .ndjson     an object per line, or a list of them; also packed, as FILE.jsonl.gz
FILE.parquet                   columns
FOLDER                         a Hugging Face dataset as `save_to_disk` writes it
sqlite:///…, postgresql://…    the ratings of a registry
"""

import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from penstock.config.settings import ConfigurationError
from penstock.registry.ratings import KeptRating
from penstock.registry.records import RegistryError
from penstock.registry.registry import Registry
from penstock.registry.row_file import PACKED, SUFFIXES, RowFile
from penstock.runtime.output_file import replace_file
from penstock.workloads.language.prompt import Prompt, identity, parse_prompt
from penstock.workloads.language.settings import as_configuration_error

# ---- Scales: raw scores mapped to [−1, 1].

_THUMBS: Final[dict[str, float]] = {"up": 1.0, "down": -1.0}


@dataclass(frozen=True, slots=True)
class Scale:
    """A mapping of scores. name: as it was declared; a trained model records it."""

    name: str
    to_score: Callable[[Any], float]
    """Returns a raw score, normalised; raises ValueError for one that is not on the scale."""


def parse_scale(name: str) -> Scale:
    """Return a scale by its name; raises ValueError, which lists the names."""
    if name == "thumbs":
        return Scale(name, _thumb)
    if name == "none":
        return Scale(name, _number)
    bounds = {"stars": (1.0, 5.0), "percent": (0.0, 100.0)}.get(name) or _bounds(name)
    return Scale(name, lambda value: _within(value, *bounds, name=name))


def scale_of(name: str, where: str = "") -> Scale:
    """Return `parse_scale` of a setting; raises ConfigurationError that begins with `where`."""
    try:
        return parse_scale(name)
    except ValueError as error:
        raise ConfigurationError(f"{where}{error}") from error


def _bounds(name: str) -> tuple[float, float]:
    low, _, high = name.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1]) and bounds[0] < bounds[1]):
        raise ValueError(f"scale={name!r}: use thumbs, stars, percent, LOW:HIGH (such as 0:10), or none")
    return bounds


def _within(value: Any, low: float, high: float, *, name: str) -> float:
    number = _number(value)
    if not low <= number <= high:
        raise ValueError(f"score={number:g} is outside {low:g} to {high:g} (scale {name})")
    return 2 * (number - low) / (high - low) - 1


def _thumb(value: Any) -> float:
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if isinstance(value, str) and value.lower() in _THUMBS:
        return _THUMBS[value.lower()]
    if isinstance(value, int | float) and value in (1, -1):
        return float(value)
    # 0 means a thumb down in some sources and no opinion in others.
    raise ValueError(
        f"score={value!r} is no thumb: use true, false, 1, -1, up or down (for 0 and 1 scale 0:1)"
    )


def _number(value: Any) -> float:
    if value is None:
        raise ValueError("no score")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"score={value!r} is {type(value).__name__}, not a number")  # noqa: TRY004
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"score={value!s:.80} is not finite")
    return float(value)


SHOWN: Final = 10
"""Bad rows whose place and reason are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A scored response. score: normalised. where: place of the row, for messages."""

    prompt: Prompt
    response: str
    score: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A response that is better than another one to the same prompt."""

    prompt: Prompt
    chosen: str
    rejected: str
    where: str


@dataclass(slots=True, kw_only=True)
class Judged:
    """One rater's ratings of a response. shares: 0 to 1 by key, without the keys that are not rated."""

    prompt: Prompt
    response: str
    where: str
    shares: dict[str, float] = field(default_factory=dict)


Example = Scored | Preference | Judged
Row = tuple[str, Any]
"""Its place for messages, and its content: a mapping, or a ValueError for one that cannot be read."""
T = TypeVar("T")


@dataclass(slots=True)
class BadRows:
    """Rows that cannot be used: their count, and the first SHOWN with place and reason."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        rest = self.count - len(self.shown)
        return [*self.shown, *([f"… and {rest} more bad rows"] if rest else [])]


def made_of(rows: Iterable[Row], bad: BadRows, make: Callable[[str, Any], T]) -> Iterator[T]:
    """Yield what `make` returns for each place and row; `bad` counts rows for which it raises ValueError."""
    for where, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            made = make(where, row)
        except ValueError as error:
            bad.add(where, str(error))
        else:
            yield made


def to_example(row: Mapping[str, Any], scale: Scale, where: str) -> Example:
    """Return the example of a row with `prompt`, and `response` and `score` or `chosen` and `rejected`."""
    prompt = parse_prompt(present(row, "prompt"))
    if is_pair(row) and row.get("score") is not None:
        raise ValueError("holds a score and a pair: make two rows of it")
    if is_pair(row):
        return preference_of(row, prompt, where)
    response = response_of(row, "response")
    score = scale.to_score(present(row, "score"))
    return Scored(prompt=prompt, response=response, score=score, where=where)


def is_pair(row: Mapping[str, Any]) -> bool:
    return row.get("chosen") is not None or row.get("rejected") is not None


def preference_of(row: Mapping[str, Any], prompt: Prompt, where: str) -> Preference:
    chosen, rejected = response_of(row, "chosen"), response_of(row, "rejected")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, where=where)


def summary(examples: Sequence[Example]) -> dict[str, int]:
    kinds = Counter(type(example).__name__ for example in examples)
    return {"scored": kinds["Scored"], "pairs": kinds["Preference"]}


def key_of(row: Mapping[str, Any]) -> str:
    key = "" if row.get("key") is None else row["key"]
    if not isinstance(key, str):
        raise ValueError(f"key={key!r} is no text")  # noqa: TRY004 - counted with the other bad rows
    return key


def present(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"no {name}")
    return row[name]


def response_of(row: Mapping[str, Any], name: str) -> str:
    """Return a response as text; it may be a conversation of one message. Raises ValueError."""
    value = present(row, name)
    if isinstance(value, str):
        return value
    turns = parse_prompt(value)
    if isinstance(turns, str) or len(turns) != 1:
        raise ValueError(f"{name} holds {len(turns)} messages: give the last alone, the others in `prompt`")
    return turns[0].content


# ---- Training and validation examples without common prompts.


class Split(NamedTuple):
    """Both in the order of the source."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]


def split(examples: Sequence[Example], *, share: float, seed: int) -> Split:
    """Return a split with `share` of the examples for validation, up to those of one prompt; 0: none."""
    if share == 0:
        return Split(tuple(examples), ())
    of_prompt: dict[str, int] = defaultdict(int)
    for example in examples:
        of_prompt[identity(example.prompt)] += 1
    if len(of_prompt) < 2:
        raise ConfigurationError(
            "all examples are of one prompt, which cannot be on both sides: give more prompts, or "
            "validation_share=0"
        )
    held: set[str] = set()
    count = 0
    for prompt in sorted(of_prompt, key=lambda prompt: place_of(prompt, seed))[:-1]:
        if count >= share * len(examples):
            break
        held.add(prompt)
        count += of_prompt[prompt]
    sides: tuple[list[Example], list[Example]] = [], []
    for example in examples:
        sides[identity(example.prompt) in held].append(example)
    return Split(tuple(sides[0]), tuple(sides[1]))


def place_of(prompt: str, seed: int) -> bytes:
    """Return the sort key of a prompt, by its `identity`, in an order that depends on the seed alone."""
    return hashlib.sha256(f"{seed}\n{prompt}".encode()).digest()


# ---- Rows of a place, each with a name for messages.


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
    if Path(path.name.removesuffix(PACKED)).suffix not in SUFFIXES and path.suffix != ".parquet":
        raise ConfigurationError(
            f"feedback={place}: use {', '.join(SUFFIXES)}, also with {PACKED}, .parquet, a dataset's folder, "
            "or a registry's URL"
        )
    if part is not None:
        raise ConfigurationError(f"--part {part!r}: {place} has no parts")
    return _parquet(path) if path.suffix == ".parquet" else _lines(path)


def _lines(path: Path) -> Iterator[Row]:
    with RowFile.of(path, f"feedback={path}") as file:
        for number, row in file.rows():
            yield f"{path.name} {file.unit} {number}", row


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - needed for such files only

    shown = f"feedback={path}: no Parquet file"
    with as_configuration_error(shown, ArrowException, OSError), parquet.ParquetFile(path) as file:
        batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_PAGE))
        for number, row in enumerate(chain.from_iterable(batches), start=1):
            yield f"{path.name} row {number}", row


def _dataset(path: Path, part: str | None) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 - needed for such folders only

    with as_configuration_error(
        f"feedback={path}: no dataset that `save_to_disk` wrote", FileNotFoundError, ValueError
    ):
        loaded = datasets.load_from_disk(str(path))
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
    shown = f"feedback={url.partition('://')[0]}://…"
    with as_configuration_error(shown, RegistryError, ValueError), Registry.read(url) as registry:
        after = 0
        while page := registry.ratings(policy, after=after, limit=_PAGE):
            after = page[-1].number
            for kept in page:
                yield f"rating {kept.number}", rating_row(kept)


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, whole and on the disk when this returns; raises OSError."""
    replace_file(file, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def rating_row(kept: KeptRating) -> dict[str, Any]:
    """Return a rating of a registry as a row. number: rises with each rating. at_s: Unix seconds."""
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


# ---- Feedback of one key as examples.

COLUMNS: Final = ("prompt", "response", "score", "chosen", "rejected", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Feedback as a user names it.

    part: split of a dataset, or policy of a registry. key: read the rows of this key (`helpful`); None: all
    rows, which must have one key. columns: for each of our names the file's name, where they differ.
    """

    place: str
    scale: Scale
    part: str | None = None
    key: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Examples of a place. other_key: number of rows with another key."""

    examples: tuple[Example, ...]
    bad: BadRows
    other_key: int = 0


def read(source: Source) -> Feedback:
    for name in source.columns:
        if name not in COLUMNS:
            raise ConfigurationError(f"--column {name}=…: use one of {', '.join(COLUMNS)}")
    bad, other_key, keys = BadRows(), 0, set[str]()

    def make(where: str, row: Any) -> Example | None:
        nonlocal other_key
        row = named(row, source.columns)
        key = key_of(row)
        if source.key is not None and key != source.key:
            other_key += 1
            return None
        example = to_example(row, source.scale, where)
        keys.add(key)
        return example

    found = made_of(rows_of(source.place, source.part), bad, make)
    examples = tuple(one for one in found if one is not None)
    check_some(source.place, examples, bad, other_key, f"--key {source.key}")
    if len(keys) > 1:
        names = ", ".join(sorted(key or "(none)" for key in keys))
        raise ConfigurationError(f"feedback={source.place}: rows rate {names}; choose one with --key")
    return Feedback(examples, bad, other_key)


def named(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    return {**row, **{ours: row.get(theirs) for ours, theirs in columns.items()}}


def check_some(
    place: str, examples: Sequence[Example], bad: BadRows, other_key: int, wanted: str | None
) -> None:
    """Raise ConfigurationError where there are no examples. wanted: the key that was read, for the error."""
    if not examples:
        lines = [f"feedback={place}: no row can be used", *bad.lines()]
        lines += [f"{other_key} rows rate something else than {wanted}"] if other_key else []
        raise ConfigurationError("\n".join(lines))
