import gzip
import io
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.configuration_error import ConfigurationError
from penstock.registry import row_file
from penstock.registry.row_file import RowFile, parse_row

BOM = b"\xef\xbb\xbf"
ROWS: list[dict[str, Any]] = [
    {"a": 1},
    {"b": "two\u2028lines\u0085here"},
    {"c": [1.5, None, True, "\U0001f600"]},
]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]


def told(content: bytes) -> list[tuple[int, Any]]:
    """Each row by number; of a bad one the reason."""
    return [
        (n, str(row) if isinstance(row, ValueError) else row) for n, row in RowFile.of_bytes(content).rows()
    ]


@pytest.mark.parametrize("begin", [b"", BOM, b"  ", BOM + b" "])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("last", [True, False])
def test_rows_are_the_same_with_every_end_of_a_line(begin: bytes, end: bytes, last: bool) -> None:
    content = begin + end.join(LINES) + (end if last else b"")
    assert told(content) == list(enumerate(ROWS, 1))
    assert told(begin + end + content) == list(enumerate(ROWS, 2))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("begin", [b"", BOM, b"\n \r\n", BOM + b"\n"])
def test_a_list_of_rows_is_rows(begin: bytes, indent: int | None) -> None:
    for ensure_ascii in (True, False):
        content = begin + json.dumps(ROWS, indent=indent, ensure_ascii=ensure_ascii).encode()
        assert told(content) == [(1, ROWS[0]), (2, ROWS[1]), (3, ROWS[2])]
        assert told(content.replace(b"\n", b"\r\n")) == [(1, ROWS[0]), (2, ROWS[1]), (3, ROWS[2])]
    assert RowFile.of_bytes(content).unit == "item"
    assert told(b"[]") == told(b" [ ]\n") == told(b"") == told(b"\n\n") == []


def test_blank_lines_are_counted_and_are_no_rows() -> None:
    assert told(b'\n{"a": 1}\n \t\r\n\n{"b": 2}\n\n') == [(2, {"a": 1}), (5, {"b": 2})]


BAD = [
    (b"{", "no JSON object: "),
    (b'{"a": "bad\xe9"}', "no JSON object: byte 0xe9 in column 11 is not UTF-8"),
    (b'{"a": "cut \\ud83d"}', "a='cut \\ud83d': holds half of a surrogate pair"),
    (b'{"a": {"b": ["\\uDE00 rest"]}}', "a.b.0='\\ude00 rest': holds half of a surrogate pair"),
    (b'{"\\ud83d": 1}', "row='\\ud83d': holds half of a surrogate pair"),
    (b'{"a": {"\\ud83d": NaN}}', "a='\\ud83d': holds half of a surrogate pair"),
    (b'{"a": NaN}', "a='nan': is no finite number"),
    (b'{"a": {"b": [0, -Infinity]}}', "a.b.1='-inf': is no finite number"),
    (b'{"a": 1e999}', "a='inf': is no finite number"),
    (b'{"a": 1' + b"0" * 400 + b"}", "a='inf': is no finite number"),
    (b'{"a": -1' + b"0" * 309 + b"}", "a='-1000"),
    (b'{"a": 1' + b"0" * 9000 + b"}", "a='inf': is no finite number"),
    (b'{"a": 1, "a": 1}', "no JSON object: 'a' is there twice"),
    (b'{"a": {"b": 1, "b": 2}}', "no JSON object: 'b' is there twice"),
    (b"3", "no JSON object: holds int, not an object"),
    (b"null", "no JSON object: holds NoneType, not an object"),
    (b'{"a": ' + b"[" * 100_000, "no JSON object: "),
    (b'{"a": ' + b"[" * 900 + b"NaN" + b"]" * 900 + b"}", ""),
    (b"\x00", "no JSON object: "),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "why"), BAD)
def test_a_bad_row_is_named_and_those_around_it_are_read(bad: bytes, why: str) -> None:
    (first, (number, said), last) = told(b'{"x": 1}\n' + bad + b'\n{"y": 2}')
    assert (first, number, last) == ((1, {"x": 1}), 2, (3, {"y": 2}))
    assert said.startswith(why)


@pytest.mark.parametrize(("bad", "why"), BAD)
def test_of_a_list_no_bad_item_is_lost(bad: bytes, why: str) -> None:
    found = told(b'[{"x": 1}, ' + bad + b', {"y": 2}]')
    assert found[0] == (1, {"x": 1})
    assert found[1][0] == 2
    assert isinstance(found[1][1], str)
    is_json = found[-1] == (3, {"y": 2})
    assert is_json or (len(found) == 2 and found[1][1].startswith("no JSON object: ")), found


@pytest.mark.parametrize(
    "content", [b'[{"a": 1}', b'[{"a": 1}] {"b": 1}', b'[{"a": 1} {"b": 1}]', b'[{"a": 1}, {"b']
)
def test_a_list_without_its_end_or_with_more_behind_it_says_so(content: bytes) -> None:
    (first, (number, said)) = told(content)
    assert (first, number) == ((1, {"a": 1}), 2)
    assert said.startswith("no JSON object: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_is_read_is_what_was_written_or_is_refused(value: Any) -> None:
    line = json.dumps({"value": value}).encode()
    is_fine = True
    try:
        json.dumps({"value": value}, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        is_fine = False
    if is_fine:
        assert parse_row(line) == {"value": value}
        assert told(b"[" + line + b"]") == told(line) == [(1, {"value": value})]
    else:
        with pytest.raises(ValueError, match="half of a surrogate pair|no finite number"):
            parse_row(line)


@given(st.binary(max_size=40), st.integers(0, 60))
def test_no_damage_ends_the_reading(noise: bytes, place: int) -> None:
    for content in (b"\n".join(LINES), b"[" + b",".join(LINES) + b"]"):
        for number, row in RowFile.of_bytes(content[:place] + noise + content[place + len(noise) :]).rows():
            assert number > 0
            assert isinstance(row, dict | ValueError)


def test_a_packed_file_and_a_pipe_are_read_like_a_plain_one(tmp_path: Path) -> None:
    plain = b"\n".join(LINES)
    files = {
        "a.jsonl": plain,
        "a.jsonl.gz": gzip.compress(plain),
        "a.json": gzip.compress(b"[" + b",".join(LINES) + b"]"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with RowFile.of(tmp_path / name) as file:
            assert [row for _, row in file.rows()] == ROWS, name
            assert [row for _, row in file.rows()] == ROWS, f"{name} again"
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(plain))
    writer.start()
    with RowFile.of(tmp_path / "pipe") as file:
        assert [row for _, row in file.rows()] == ROWS
    writer.join()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(random.Random(0).randbytes(5000))
    for name, content in (("cut.gz", packed[:-9]), ("spoilt.gz", packed[:40] + b"\xff\xff" + packed[42:])):
        (tmp_path / name).write_bytes(content)
        with (
            pytest.raises(ConfigurationError, match=rf"{name}: cannot be read: "),
            RowFile.of(tmp_path / name),
        ):
            pass
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with (
            pytest.raises(ConfigurationError, match=r"^--late .*: cannot be read: "),
            RowFile.of(path, f"--late {path}"),
        ):
            pass
    monkeypatch.setattr(row_file, "MAX_LIST_BYTES", 20)
    (tmp_path / "long.json").write_bytes(b"[" + b",".join(LINES) + b"]")
    with (
        pytest.raises(ConfigurationError, match="write one object on each line"),
        RowFile.of(tmp_path / "long.json"),
    ):
        pass


def test_a_line_that_is_too_long_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    file = RowFile(io.BytesIO(b'{"a": "' + b"x" * 500 + b'"}\n{"b": 1}'), io.BytesIO())
    assert [(number, len(line)) for number, _, line in file.lines(100)] == [(1, 101), (2, 8)]
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        parse_row(b"x" * 101, 100)
    assert [file.line_at(place, 100) for _, place, _ in file.lines(100)][1] == b'{"b": 1}'
