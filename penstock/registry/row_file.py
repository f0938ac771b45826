"""Rows that people bring: JSON objects, one on each line or all in one list, plain or packed by gzip.

A row that cannot be read is a ValueError in its place, with the reason; the rows after it are read.
"""

import gzip
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final

from penstock.config.configuration_error import ConfigurationError

MAX_ROW_BYTES: Final = 16 * 1024 * 1024
MAX_LIST_BYTES: Final = 2**30
"""A list is parsed as a whole."""
SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
PACKED: Final = ".gz"
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_HEAD_BYTES: Final = 2**20
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_SUSPECT: Final = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]|[eE]\+?[0-9]{3}|[0-9]{300}")
"""What a line has where a number is not finite or a text holds half of a surrogate pair."""
_MOST_DIGITS: Final = 400


class RowFile:
    """Rows by number, from 1. unit: what the numbers count, `line` or `item`."""

    def __init__(self, file: IO[bytes], copy: IO[bytes], most_rows: int | None = None) -> None:
        """Read a file that can seek. copy: an empty one for its lines, where it has not one row a line.

        most_rows: of a list, those that are read; None: all.
        """
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        self.unit, self._file = "line", file
        if head.removeprefix(_BOM).lstrip()[:1] == b"[":
            self.unit, self._file = "item", copy
            copy.writelines(islice(_items(file.read(MAX_LIST_BYTES + 1)), most_rows))
        elif b"\n" not in head and b"\r" in head[:-1]:
            self._file = copy
            copy.writelines(part.replace(b"\r", b"\n") for part in iter(lambda: file.read(_HEAD_BYTES), b""))

    @classmethod
    @contextmanager
    def of(cls, path: Path, named: str = "") -> Iterator["RowFile"]:
        """Yield the rows of a file; raises ConfigurationError that begins with `named`, or with the path."""
        where = named or str(path)
        with ExitStack() as stack:
            try:
                plain, copy = (stack.enter_context(SpooledTemporaryFile(_HEAD_BYTES)) for _ in range(2))
                file = stack.enter_context(path.open("rb"))
                is_packed = file.peek(len(_GZIP)).startswith(_GZIP)
                if is_packed or not file.seekable():
                    copyfileobj(gzip.GzipFile(fileobj=file) if is_packed else file, plain)
                    plain.seek(0)
                    rows = cls(plain, copy)
                else:
                    rows = cls(file, copy)
            except (OSError, EOFError, zlib.error, ValueError) as error:
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                raise ConfigurationError(f"{where}: cannot be read: {why}") from error
            yield rows

    @classmethod
    def of_bytes(cls, content: bytes, most_rows: int | None = None) -> "RowFile":
        """Return the rows of a body; raises ValueError for a list of more than MAX_LIST_BYTES."""
        return cls(io.BytesIO(content), io.BytesIO(), most_rows)

    def lines(self, most_bytes: int = MAX_ROW_BYTES) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, place and content of each line that is not blank.

        Of a line that is longer than `most_bytes`, the content is its first `most_bytes + 1` bytes.
        """
        self._file.seek(0)
        number = place = 0
        while line := self._file.readline(most_bytes + 1):
            number, begin, whole = number + 1, place, line
            place += len(line)
            while whole and not whole.endswith(b"\n"):
                whole = self._file.readline(most_bytes + 1)
                place += len(whole)
            if line.removeprefix(_BOM).strip():
                yield number, begin, line.rstrip(b"\r\n")

    def line_at(self, place: int, most_bytes: int = MAX_ROW_BYTES) -> bytes:
        """Return the line at a place that `lines` gave, while nothing iterates over them."""
        self._file.seek(place)
        return self._file.readline(most_bytes + 1).rstrip(b"\r\n")

    def rows(self) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
        for number, _, line in self.lines():
            try:
                yield number, parse_row(line)
            except ValueError as error:
                yield number, error


def parse_row(line: bytes, most_bytes: int = MAX_ROW_BYTES) -> dict[str, Any]:
    """Return the object on a line; raises ValueError that names what is wrong with it, and where."""
    if len(line) > most_bytes:
        raise ValueError(f"longer than {most_bytes} bytes: at most {most_bytes} are read")
    is_suspect = _SUSPECT.search(line) is not None
    try:
        text = line.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_once, parse_int=_integer if is_suspect else None)
        wrong = _wrong(value, "") if is_suspect else None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"no JSON object: byte {line[error.start]:#04x} in column {error.start + 1} is not UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON object: {error}") from error
    if wrong:
        raise ValueError(wrong)
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object: holds {type(value).__name__}, not an object")  # noqa: TRY004
    return value


def _integer(text: str) -> float:
    """Return a number; int() takes a time that is quadratic in the digits, and has a limit of them."""
    return int(text) if len(text) < _MOST_DIGITS else math.inf


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def _wrong(value: Any, name: str) -> str | None:
    """Return what is wrong with the first number that is not finite, or text with half of a pair."""
    match value:
        case dict():
            inside = [pair for key, one in value.items() for pair in ((key, name), (one, f"{name}.{key}"))]
            return next(filter(None, (_wrong(one, where) for one, where in inside)), None)
        case list():
            return next(filter(None, (_wrong(one, f"{name}.{at}") for at, one in enumerate(value))), None)
        case str():
            why = "holds half of a surrogate pair" if re.search("[\ud800-\udfff]", value) else None
        case bool() | None:
            why = None
        case _:
            why = None if abs(value) <= sys.float_info.max else "is no finite number of 64 bits"
    shown = name.removeprefix(".").encode(errors="replace").decode() or "row"
    return why and f"{shown}={str(value)[:80]!r}: {why}"


def _items(content: bytes) -> Iterator[bytes]:
    """Yield each item of a list as a line; behind one that is no JSON, all the rest is one line."""
    if len(content) > MAX_LIST_BYTES:
        raise ValueError(f"a list of more than {MAX_LIST_BYTES} bytes: write one object on each line")
    # Latin-1 has a character for each byte, so that a byte that is not UTF-8 spoils its own item alone.
    text = content.removeprefix(_BOM).decode("latin-1")
    scan = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode

    def behind(place: int) -> int:
        found = _BLANK.match(text, place)
        return found.end() if found else place

    place = behind(text.index("[") + 1)
    while not text.startswith("]", place):
        try:
            _, end = scan(text, place)
        except (ValueError, RecursionError):
            break
        yield _as_line(text[place:end])
        place = behind(end)
        if not text.startswith(",", place):
            break
        place = behind(place + 1)
    if text[place:].strip() != "]":
        yield _as_line(text[place:] or "[")


def _as_line(text: str) -> bytes:
    return text.replace("\r", " ").replace("\n", " ").encode("latin-1") + b"\n"
