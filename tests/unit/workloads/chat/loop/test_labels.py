"""What counts of what people have said, and which prompts a round trains on."""

import json
from pathlib import Path

from penstock.workloads.chat.loop_state import (
    NewRatings,
    believed,
    new_among,
    replayed_prompts,
)
from penstock.workloads.language.feedback import write_rows
from tests.support.chat.loop_stand import POLICY, loop_stand


def test_each_rating_is_counted_once_and_a_round_reads_none_that_came_later(tmp_path: Path) -> None:
    with loop_stand(tmp_path) as stand:
        stand.rate(5)
        new = NewRatings(POLICY, 2)
        assert (new.look(stand.registry), new.look(stand.registry), new.newest) == (3, 3, 5)
        stand.rate(2, begin=5)
        assert (new.look(stand.registry), new.newest) == (5, 7)
        rows = believed(stand.registry, POLICY, 5)
        assert [row["number"] for row in rows] == [1, 2, 3, 4, 5]
        assert new_among(rows, 3) == 2
        stand.registry.delete_ratings("", "person-4")
        assert [row["number"] for row in believed(stand.registry, POLICY, 7)][3:] == [4, 6, 7]


def test_prompts_are_what_people_said_and_those_of_the_run_each_once(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    file = tmp_path / "prompts.jsonl"
    write_rows(file, [{"prompt": said}, {"prompt": "old"}, {"response": "x"}])
    with file.open("a") as out:
        out.write("no json\n")
    rows = [{"prompt": said}, {"prompt": [*said, {"role": "user", "content": "more"}]}, {"prompt": said}]
    found = replayed_prompts(rows, str(file))
    assert [json.dumps(one["prompt"]) for one in found] == [
        json.dumps(said),
        json.dumps([*said, {"role": "user", "content": "more"}]),
        '"old"',
    ]
    assert replayed_prompts(rows[:1], "") == [{"prompt": said}]
