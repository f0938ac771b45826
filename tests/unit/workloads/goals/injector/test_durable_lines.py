"""A line is there as a whole or not at all, wherever the process that wrote it was killed."""

import json
from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.injection_journal import add_line, read_lines


def test_a_line_that_was_cut_anywhere_is_gone_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first, second = b'{"a":1}\n', b'{"text":"\xc3\xbc"}\n'
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        add_line(path, {"b": 2})
        assert [line for _, line in read_lines(path)] == [{"a": 1}, {"b": 2}]


def test_a_beginning_longer_than_what_is_read_at_once_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":"' + b"x" * 200_000)
    add_line(path, {"c": 3})
    assert path.read_bytes() == b'{"a":1}\n{"c":3}\n'


@pytest.mark.parametrize("bad", [b"no json\n", b"[1]\n"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n' + bad)
    with pytest.raises(ConfigurationError, match="line 2"):
        list(read_lines(path))


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with pytest.raises(ValueError, match="Out of range"):
        add_line(path, {"a": float("nan")})
    add_line(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
