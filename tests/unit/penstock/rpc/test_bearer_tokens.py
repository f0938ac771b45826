"""The file of accepted tokens on the server's side."""

from pathlib import Path

import pytest

from penstock.rpc.bearer_tokens import AcceptedTokens, digest
from penstock.rpc.identity import Unidentified

LINE = f"{digest('secret')} penstock://run-a/operator\n"


def test_a_file_that_stays_broken_is_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was one line in the log for every call while it lasted; the tokens of before stay."""
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
