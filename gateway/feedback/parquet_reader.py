"""The process that reads a Parquet file.

    python -m gateway.feedback.parquet_reader MOST_ROWS MOST_BYTES LEFT_OUT…

The file comes on the standard input, its rows leave as JSON lines, without the columns LEFT_OUT and without
nulls. It ends with REFUSED and a sentence on the standard error for a file that is none or holds too much.
"""

import json
import resource
import sys
from collections.abc import Sequence
from typing import IO, Any, Final

REFUSED: Final = 3
MEMORY_BYTES: Final = 2 * 1024**3
"""Address space of the process: the library and its data."""
CPU_S: Final = 30
AT_ONCE: Final = 64
"""Rows that are unfolded at the same time."""
MAX_NAME: Final = 64
"""Characters of a column's name in a message."""


class _RefusedFileError(Exception):
    pass


def main(content: bytes, out: IO[bytes], most_rows: int, most_bytes: int, left_out: Sequence[str]) -> int:
    """Write the rows of a file; returns the exit code."""
    import pyarrow as pa  # noqa: PLC0415 - after the bounds
    from pyarrow import parquet  # noqa: PLC0415

    try:
        with parquet.ParquetFile(pa.BufferReader(content)) as file:
            _write(file, out, most_rows, most_bytes, left_out)
    except _RefusedFileError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        sys.stderr.write("this is no file in the format Parquet, or a damaged one\n")
        return REFUSED
    return 0


def _write(file: Any, out: IO[bytes], most_rows: int, most_bytes: int, left_out: Sequence[str]) -> None:
    names = file.schema_arrow.names
    if len(set(names)) != len(names):
        raise _RefusedFileError("two columns of the Parquet file have the same name")
    if file.metadata.num_rows > most_rows:
        raise _RefusedFileError(f"{file.metadata.num_rows} rows: send at most {most_rows} at a time")
    wanted = [name for name in names if name not in left_out]
    number, written = 0, 0
    for batch in file.iter_batches(AT_ONCE, columns=wanted, use_threads=False):
        for row in batch.to_pylist():
            number += 1
            line = _line(row, number)
            written += len(line)
            if number > most_rows:
                raise _RefusedFileError(f"more than {most_rows} rows: send at most as many at a time")
            if written > most_bytes:
                raise _RefusedFileError(f"the rows unfold into more than {most_bytes} bytes: send fewer")
            out.write(line)


def _line(row: dict[str, Any], number: int) -> bytes:
    said = {name: value for name, value in row.items() if value is not None}
    try:
        return json.dumps(said).encode() + b"\n"
    except TypeError as error:
        odd = next(name for name, value in said.items() if not isinstance(value, str | int | float | bool))
        raise _RefusedFileError(f"row {number}: {odd[:MAX_NAME]}: neither a text nor a number") from error


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    sent = sys.stdin.buffer.read()
    sys.exit(main(sent, sys.stdout.buffer, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
