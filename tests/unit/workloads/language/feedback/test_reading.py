"""Feedback from every place, and what becomes of rows that cannot be used."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.config.settings import ConfigurationError
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.language.feedback import (
    SHOWN,
    Feedback,
    Preference,
    Scored,
    Source,
    parse_scale,
    read,
)
from penstock.workloads.language.prompt import Message
from tests.support.storage.ready_tables import with_registry

ROWS: list[dict[str, Any]] = [
    {"prompt": "p", "response": "a", "score": 5},
    {"prompt": "q", "response": "b", "score": 1},
]
PAIR: dict[str, Any] = {"prompt": "p", "chosen": "a", "rejected": "b"}


def written(folder: Path, rows: Sequence[object]) -> Path:
    """A file of JSON lines; a text is a line as it is."""
    file = folder / "feedback.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def found(place: object, **more: Any) -> Feedback:
    """What is read, on stars."""
    return read(Source(place=str(place), scale=parse_scale("stars"), **more))


def check(feedback: Feedback) -> None:
    """The two rows of ROWS."""
    assert 0 == feedback.bad.count
    scored = [example for example in feedback.examples if isinstance(example, Scored)]
    assert [("p", "a", 1.0), ("q", "b", -1.0)] == [(one.prompt, one.response, one.score) for one in scored]


def test_json_lines(tmp_path: Path) -> None:
    check(found(written(tmp_path, [ROWS[0], "", ROWS[1]])))


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    check(found(tmp_path / "a.parquet"))


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    plain = datasets.Dataset.from_list(ROWS)
    plain.save_to_disk(tmp_path / "plain")
    check(found(tmp_path / "plain"))
    datasets.DatasetDict({"train": plain.select([0]), "rated": plain}).save_to_disk(tmp_path / "split")
    check(found(tmp_path / "split", part="rated"))
    assert 1 == len(found(tmp_path / "split").examples)
    with pytest.raises(ConfigurationError, match="--part takes one of train, rated"):
        found(tmp_path / "split", part="test")


def test_the_ratings_of_a_registry(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.sqlite"
    with Registry.open(with_registry(url), migrate=True) as registry:
        registry.add_ratings(
            "chat", [Rating(prompt=f"p{index}", response="a", score=4.0) for index in range(1500)]
        )
        registry.add_ratings("other", [Rating(prompt="p", response="a", rejected="b")])
    everything = found(url)
    assert 1501 == len(everything.examples)
    assert isinstance(everything.examples[-1], Preference)
    assert 1500 == len(found(url, part="chat").examples)


def test_a_conversation_and_a_response_of_one_message(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    row = {"prompt": turns, "chosen": [{"role": "assistant", "content": "hi"}], "rejected": "no"}
    (example,) = found(written(tmp_path, [row])).examples
    assert isinstance(example, Preference)
    assert (Message("user", "hello"),) == example.prompt
    assert "hi" == example.chosen


def test_columns_of_another_name(tmp_path: Path) -> None:
    rows = [
        {"question": "p", "response": "a", "helpful": 5},
        {"question": "q", "response": "b", "helpful": 1},
    ]
    check(found(written(tmp_path, rows), columns={"prompt": "question", "score": "helpful"}))
    with pytest.raises(ConfigurationError, match="use one of prompt, response"):
        found(written(tmp_path, rows), columns={"prompts": "question"})


def test_rows_that_rate_several_things_want_a_key(tmp_path: Path) -> None:
    file = written(tmp_path, [{**ROWS[0], "key": "helpful"}, {**ROWS[1], "key": "safe"}])
    with pytest.raises(ConfigurationError, match="rows rate helpful, safe; choose one with --key"):
        found(file)
    feedback = found(file, key="safe")
    assert (1, 1) == (len(feedback.examples), feedback.other_key)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "holds list, not an object"),
        ({"response": "a", "score": 1}, "no prompt"),
        ({"prompt": 7, "response": "a", "score": 1}, "prompt is int"),
        ({"prompt": [], "response": "a", "score": 1}, "empty conversation"),
        ({"prompt": [{"role": "user"}], "response": "a", "score": 1}, "without a text under `role`"),
        ({"prompt": "p", "score": 1}, "no response"),
        ({"prompt": "p", "response": "a"}, "no score"),
        ({"prompt": "p", "response": "a", "score": 9}, "outside 1 to 5"),
        ({**PAIR, "score": 1}, "a score and a pair"),
        ({"prompt": "p", "chosen": "a"}, "no rejected"),
        ({**PAIR, "rejected": "a"}, "chosen and rejected are the same"),
        ({**ROWS[0], "key": 7}, "key=7 is no text"),
    ],
)
def test_a_bad_row_is_named_with_line_and_reason(tmp_path: Path, row: object, reason: str) -> None:
    feedback = found(written(tmp_path, [ROWS[0], row, ROWS[1]]))
    assert 2 == len(feedback.examples)
    assert 1 == feedback.bad.count
    (line,) = feedback.bad.lines()
    assert line.startswith("feedback.jsonl line 2: ")
    assert reason in line


def test_many_bad_rows_are_all_counted_and_some_are_shown(tmp_path: Path) -> None:
    feedback = found(written(tmp_path, [*ROWS, *[{"prompt": "p"}] * 500]))
    assert 500 == feedback.bad.count
    lines = feedback.bad.lines()
    assert SHOWN + 1 == len(lines)
    assert f"… and {500 - SHOWN} more bad rows" == lines[-1]


def test_no_good_row_is_an_error_that_shows_the_bad_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no row can be used\nfeedback.jsonl line 1: no response"):
        found(written(tmp_path, [{"prompt": "p"}]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "no such file"),
        ("a.csv", "use .jsonl"),
        ("a.parquet", "no Parquet file"),
        (".", "no dataset"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(tmp_path: Path, name: str, message: str) -> None:
    for suffix in ("csv", "parquet"):
        (tmp_path / f"a.{suffix}").write_text("prompt,response\n")
    with pytest.raises(ConfigurationError, match=message):
        found(tmp_path / name)
