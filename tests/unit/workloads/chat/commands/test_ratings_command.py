"""`penstock chat ratings`: a file in, a file out, and what was dropped."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.commands import ratings


def run(folder: Path, *, as_json: bool = False, **said: Any) -> int:
    """The command by its defaults, and what is said otherwise."""
    known: dict[str, Any] = {
        "file": str(folder / "said.jsonl"), "output": folder / "kept.jsonl", "part": None, "deleted": None,
        "daily_cap": 200, "false_alarms": 0.01, "judge": None, "base": None,
    }  # fmt: skip
    return int(ratings(**known | said, as_json=as_json))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Ann says the same three times, Bob is gone, and a line is broken."""
    one = {"prompt": "a", "response": "b", "key": "thumb", "score": True}
    rows = [{**one, "rater": "ann"}] * 3 + [{**one, "rater": "bob"}, one]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "said.jsonl").write_text(text + "{\n")
    (tmp_path / "gone.txt").write_text("bob\n\n")
    return tmp_path


def test_what_counts_is_written_and_the_rest_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place, deleted=place / "gone.txt") == 0
    said = capsys.readouterr().out
    assert "2 of 5 rows count; dropped: 1 deleted, 2 repeated" in said
    assert "  ann: 2 repeated" in said
    assert "1 rows name no rater" in said
    assert "said.jsonl line 6" in said
    kept = [json.loads(line) for line in (place / "kept.jsonl").read_text().splitlines()]
    assert [row.get("rater") for row in kept] == ["ann", None]
    assert run(place, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dropped"] == {"repeated": 2}
    assert told["raters"] == {"ann": {"repeated": 2}}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"nothing": 1}, "prompt: is missing"),
        ({"prompt": "a", "response": "b"}, "score=None: must be a number"),
        ({"prompt": "a", "response": "b", "score": "high"}, "score='high': must be a number"),
        ({"prompt": "a", "response": 7, "score": 1}, "response=7: must be a text"),
        ({"prompt": "a", "chosen": "b"}, "rejected=None: must be a text"),
    ],
)
def test_a_row_that_is_no_rating_does_not_count(
    place: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], why: str
) -> None:
    file = place / "said.jsonl"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file.write_text("".join(json.dumps(one) + "\n" for one in (row, pair)))
    assert run(place) == 0
    said = capsys.readouterr().out
    assert "1 of 1 rows count" in said
    assert "1 rows are no ratings:" in said
    assert why in said
    assert [json.loads(line) for line in (place / "kept.jsonl").read_text().splitlines()] == [pair]


def test_what_cannot_be_used_is_refused_by_name(place: Path) -> None:
    for said, text in (
        ({"file": str(place / "none.jsonl")}, "no such file or folder"),
        ({"output": place / "none" / "kept.jsonl"}, "--output .*No such file"),
        ({"deleted": place / "none.txt"}, "--deleted .*cannot be read"),
        ({"daily_cap": 0}, "daily_cap=0"),
        ({"judge": place}, "holds no heads.json"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            run(place, **said)
    (place / "said.jsonl").write_text("{\n")
    with pytest.raises(ConfigurationError, match="no row can be used"):
        run(place)


def test_half_a_character_stays_what_it_was_and_costs_no_row(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    rows = [
        {"prompt": text, "response": "b", "key": "thumb", "score": True, "rater": "ann"}
        for text in ("a\ud800", "größer")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(tmp_path, output=file, as_json=True) == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert "größer" in file.read_text()
