"""Rows of a batch: read back as they were laid out, and what is no row is left out."""

from dataclasses import replace

import pytest

from penstock.workloads.language.conversation import Column
from penstock.workloads.thoughts.rows import read_rows, with_thoughts, without_thoughts
from tests.support.thoughts.small_thoughts import (
    LAYOUT,
    small_base,
    thinking_policy,
    thought_batch,
    thought_columns,
)


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> list[Column]:
    """Two thoughts on each of three questions."""
    policy = thinking_policy(small_base(tmp_path_factory.mktemp("model") / "base"))
    return thought_columns(policy, 3, 2)


def test_rows_are_read_back_as_they_were_laid_out(columns: list[Column]) -> None:
    rows = read_rows(thought_batch(columns[:4], columns[4:]), LAYOUT)
    assert rows is not None
    assert (len(rows), len(rows.questions), rows.left_out) == (6, 3, 0)
    assert rows.question_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert with_thoughts(rows, LAYOUT).rows == tuple(one.ids for one in columns)
    sampled = [value for one in columns for value in one.turns[0].log_prob]
    assert rows.behaviour.tolist() == pytest.approx(sampled)
    assert rows.sent.tolist() == pytest.approx([one.turns[0].reward for one in columns])


def test_a_question_is_read_once_without_a_thought(columns: list[Column]) -> None:
    rows = read_rows(thought_batch(columns), LAYOUT)
    assert rows is not None
    direct = without_thoughts(rows, LAYOUT)
    assert direct.rows == tuple(
        (*columns[number].ids[: columns[number].turns[0].start - 1], LAYOUT.equals, columns[number].ids[-1])
        for number in (0, 2, 4)
    )
    longest = max(map(len, direct.rows))
    for number, row in enumerate(direct.rows):
        assert direct.place[number] == number * longest + len(row) - 2
        assert direct.action[number] == row[-1]


@pytest.mark.parametrize("broken", ["equals", "answer", "think"])
def test_a_column_that_is_laid_out_otherwise_is_left_out(columns: list[Column], broken: str) -> None:
    ids = columns[0].ids
    begin = columns[0].turns[0].start
    changed = {
        "equals": (*ids[:-2], LAYOUT.filler, ids[-1]),
        "answer": ids[:-1],
        "think": (*ids[: begin - 1], LAYOUT.filler, *ids[begin:]),
    }[broken]
    rows = read_rows(thought_batch([replace(columns[0], ids=changed), *columns[1:]]), LAYOUT)
    assert rows is not None
    assert (len(rows), rows.left_out) == (5, 1)


def test_a_batch_in_which_nothing_was_sampled_has_no_rows(columns: list[Column]) -> None:
    assert read_rows(thought_batch([replace(one, turns=()) for one in columns]), LAYOUT) is None
