"""Rows as a file of Parquet, and back as JSON lines."""

import json
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyarrow", reason="feedback in Parquet needs the extra parquet")

from gateway.feedback import parquet_tables
from gateway.feedback.parquet_tables import read_as_lines, write_table
from gateway.frame.api_errors import ApiError

COLUMNS = {
    "number": "integer",
    "createdAt": "time",
    "prompt": "text",
    "score": "number",
    "version": "integer",
}


def test_what_is_written_comes_back() -> None:
    """Without what is only exported, and without nulls; a conversation as the JSON of it."""
    now = datetime.now(UTC)
    rows = [
        {"number": 2**62, "createdAt": now, "prompt": "ä\n😀", "score": 0.1, "version": None},
        {"number": 3, "createdAt": now, "prompt": [{"role": "user", "content": "a"}], "version": 2**53 + 1},
    ]
    lines = [json.loads(line) for line in read_as_lines(write_table(rows, COLUMNS)).splitlines()]
    assert lines == [
        {"prompt": "ä\n😀", "score": 0.1},
        {"prompt": '[{"role": "user", "content": "a"}]', "version": 2**53 + 1},
    ]
    assert read_as_lines(write_table([], COLUMNS)) == b""


def test_one_file_is_read_at_a_time() -> None:
    """A second one is asked to come again, and does."""
    content = write_table([{"prompt": "a"}], COLUMNS)
    with parquet_tables._reading:
        with pytest.raises(ApiError, match="another Parquet file") as refused:
            read_as_lines(content)
        assert refused.value.status_code == 429
    assert read_as_lines(content) == b'{"prompt": "a"}\n'
