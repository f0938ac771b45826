"""Rows as a file in the format Parquet: written here, read by a process of its own.

A file from elsewhere is data for code that was written in C++, and a small one may unfold into any amount of
it. So it is read where memory and time are bounded, one file at a time, and only JSON comes back.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.feedback.feedback_rows import MAX_ROWS, ONLY_EXPORTED
from gateway.feedback.parquet_reader import REFUSED
from gateway.frame.api_errors import ApiError
from gateway.frame.doors import MAX_IMPORT_BYTES
from penstock.config.extras import how_to_install

PARQUET: Final = "application/vnd.apache.parquet"
READ_S: Final = 60.0
"""Longest time in which a file must have been read, in seconds."""
_KEPT_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "SYSTEMROOT")
_reading = threading.Lock()


def write_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> bytes:
    """Return rows as a file, in the order of the columns; what a row does not have is null.

    columns: `text`, `integer` (64 bits), `number` (64 bits) or `time` (UTC, microseconds), by name. A text
    that is none, as a prompt that is a conversation, is there as JSON.
    Raises ApiError 409 where the gateway has no library for it.
    """
    _check_installed()
    import pyarrow as pa  # noqa: PLC0415 - an extra, and of this format alone
    from pyarrow import parquet  # noqa: PLC0415

    kinds = {
        "text": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    texts = [name for name, kind in columns.items() if kind == "text"]
    flat = [{**row, **{name: _text(row[name]) for name in texts if name in row}} for row in rows]
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(flat, schema=schema), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_as_lines(content: bytes) -> bytes:
    """Return the rows of a file as JSON lines, without what is only exported; null values are left out.

    Raises ApiError: 409 where the gateway has no library for it, 422 for what is no such file or holds more
    than may be sent, 429 while another one is read.
    """
    _check_installed()
    if not _reading.acquire(blocking=False):
        raise ApiError(429, "another Parquet file is being read: send it again in a moment", retry_s=1.0)
    try:
        command = (sys.executable, "-P", "-m", "gateway.feedback.parquet_reader")
        bounds = (str(MAX_ROWS), str(MAX_IMPORT_BYTES))
        done = subprocess.run(
            (*command, *bounds, *sorted(ONLY_EXPORTED)),
            input=content,
            capture_output=True,
            check=False,
            timeout=READ_S,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
        )
    except subprocess.TimeoutExpired as error:
        raise ApiError(422, f"the Parquet file was not read within {READ_S:g} s: send fewer rows") from error
    finally:
        _reading.release()
    if done.returncode == REFUSED:
        raise ApiError(422, done.stderr.decode(errors="replace").strip())
    if done.returncode != 0:
        raise ApiError(422, "the Parquet file cannot be read in the memory that there is: send fewer rows")
    return done.stdout


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _check_installed() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise ApiError(
            409,
            "this gateway knows no Parquet: use JSON lines, or have its operator install pyarrow: "
            + how_to_install("parquet"),
        )
