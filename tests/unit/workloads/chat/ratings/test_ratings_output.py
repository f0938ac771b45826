"""What `penstock chat ratings` writes of texts that are odd."""

import json
from pathlib import Path

from penstock.workloads.chat.commands.ratings_command import Request, main


def test_half_a_character_stays_what_it_was_and_costs_no_row(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    rows = [
        {"prompt": text, "response": "b", "key": "thumb", "score": True, "rater": "ann"}
        for text in ("a\ud800", "größer")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = Request(
        file=str(file),
        output=file,
        part=None,
        deleted=None,
        daily_cap=200,
        false_alarms=0.01,
        judge=None,
        base=None,
    )
    assert main(request, as_json=True) == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert "größer" in file.read_text()
