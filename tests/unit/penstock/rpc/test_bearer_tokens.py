"""The file of accepted tokens on the server's side."""

import sys
from pathlib import Path

import pytest

from penstock.rpc.auth import AcceptedTokens, digest
from penstock.rpc.identity import Unidentified

LINE = f"{digest('secret')} penstock://run-a/operator\n"


def test_a_file_that_stays_broken_is_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text(LINE)
    known = AcceptedTokens(file)
    file.write_text("this is no file of tokens\n")
    for _ in range(3):
        assert known.identify("Bearer secret").run == "run-a"
    assert len(caplog.records) == 1
    file.write_text("")
    with pytest.raises(Unidentified):
        known.identify("Bearer secret")


def calls_of_identify(known: AcceptedTokens) -> int:
    """Functions that are called, once the file has been read."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        known.identify("Bearer secret")
    finally:
        sys.setprofile(before)
    return count


def test_a_token_is_found_as_fast_among_many(tmp_path: Path) -> None:
    counts = []
    for others in (0, 2_000):
        file = tmp_path / f"{others}"
        lines = [f"{digest(str(index))} penstock://run-a/actor/a-{index}\n" for index in range(others)]
        file.write_text("".join([*lines, LINE]))
        known = AcceptedTokens(file)
        counts.append(calls_of_identify(known))
    assert counts[0] == counts[1]
