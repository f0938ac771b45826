"""Feedback out of a registry or a file, as lines that are feedback again."""

import json
from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.language.feedback import rows_of
from penstock.workloads.rlhf.commands import export
from tests.support.storage.ready_tables import with_registry


def test_what_a_registry_has_of_a_policy_becomes_a_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/r.sqlite"
    turns = [{"role": "user", "content": "2 + 2?"}]
    with Registry.open(with_registry(url), migrate=True) as registry:
        registry.add_ratings(
            "alpha/my_agent",
            [
                Rating(prompt="ä", response="4", score=0.5, rater="r"),
                Rating(prompt=turns, response="4", rejected="5", key="safe"),
            ],
        )
        registry.add_ratings("alpha/other", [Rating(prompt="b", response="no", score=0.1)])
    assert export(url, tmp_path / "f.jsonl", "alpha/my_agent") == 0
    written = [row for _, row in rows_of(str(tmp_path / "f.jsonl"))]
    assert written == [row for _, row in rows_of(url, "alpha/my_agent")]
    assert [row["prompt"] for row in written] == ["ä", turns]


def test_a_row_that_is_none_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "a", "score": 1}\n{"prompt"\n{"prompt": "b", "score": NaN}\n')
    assert export(str(file), None, None) == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [{"prompt": "a", "score": 1}]
    assert "bad row: f.jsonl line 2: no JSON" in said.err
    assert "bad row: f.jsonl line 3: " in said.err


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="is the file that is read"):
        export(str(file), file, None)
    with pytest.raises(ConfigurationError, match="no such file"):
        export(str(tmp_path / "none.jsonl"), tmp_path / "out.jsonl", None)
    assert [one.name for one in tmp_path.iterdir()] == ["f.jsonl"]
