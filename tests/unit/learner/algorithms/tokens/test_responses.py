"""Rows of tokens as the losses read them."""

from dataclasses import replace

import numpy as np
import torch

from penstock.learner.algorithms.responses import Grid, Responses, read_responses
from tests.support.experience.token_experience import Response, batch_of, fragment

GIVEN = (
    Response((2, 3), (4, 5, 6), (-0.1, -0.2, -0.3), 1.0, True),
    Response((2, 3, 7), (8,), (-0.4,), -1.0, False),
    Response((2, 3), (9, 9), (-0.5, -0.6), 0.0, True),
)


def read() -> Responses:
    """Of two fragments of different length."""
    found = read_responses(batch_of(fragment(GIVEN[:2]), fragment(GIVEN[2:])))
    assert found is not None
    return found


def test_what_was_sampled_lies_row_by_row() -> None:
    found = read()
    assert found.action.tolist() == [4, 5, 6, 8, 9, 9]
    assert found.behaviour.tolist() == [np.float32(x) for x in (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6)]
    assert found.reward.tolist() == [0.0, 0.0, 1.0, -1.0, 0.0, 0.0]
    assert found.counts.tolist() == [3, 1, 2]
    assert found.lengths.tolist() == [4, 3, 3]
    assert found.cut_short.tolist() == [False, True, False]
    assert found.last.tolist() == [2, 3, 5]
    assert found.left_out == 0


def test_equal_prompts_have_one_number() -> None:
    first, second, third = read().prompts().tolist()
    assert first == third != second


def test_a_micro_batch_asks_for_the_sampled_tokens_of_its_rows() -> None:
    found = read()
    parts = list(found.micro_batches(np.array([2, 0, 1]), 6))
    assert [part.rows.tokens.shape for part in parts] == [(2, 3), (1, 4)]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(6))
    for part in parts:
        rows = part.rows
        assert rows.action.tolist() == found.action[part.index].tolist()
        following = torch.cat([rows.tokens[:, 1:], torch.full((len(rows.tokens), 1), -1)], 1).flatten()[
            rows.place
        ]
        inside = following >= 0
        known = rows.present.flatten()[rows.place.clamp(max=rows.place.max() - 1) + 1] & inside
        assert (following[known] == rows.action[known]).all()
        assert rows.present.flatten()[rows.place].all()
    assert [part.rows.present.sum().item() for part in parts] == [6, 4]


def test_a_row_that_is_longer_than_the_limit_is_a_part_alone() -> None:
    assert [len(part.rows.tokens) for part in read().micro_batches(np.arange(3), 1)] == [1, 1, 1]


def test_a_grid_and_back() -> None:
    batch = batch_of(fragment(GIVEN))
    valid = batch.valid.clone()
    valid[2, 0] = False
    found = read_responses(replace(batch, valid=valid))
    assert found is not None
    grid, numbers = Grid(found), torch.arange(1.0, 6.0)
    assert grid.spread(numbers).tolist() == [[1.0, 3.0, 4.0], [2.0, 0.0, 5.0]]
    assert grid.sampled.tolist() == [[True, True, True], [True, False, True]]
    assert torch.equal(grid.gather(grid.spread(numbers)), numbers)


def test_a_batch_without_a_response_is_none() -> None:
    batch = batch_of(fragment(GIVEN))
    assert read_responses(replace(batch, valid=torch.zeros_like(batch.valid))) is None


def test_behind_a_row_its_last_token_is_read_too() -> None:
    found = read()
    parts = list(found.behind(np.array([0, 1]), 9))
    assert [part.index.tolist() for part in parts] == [[1], [0]]
    shorter, longer = (part.rows for part in parts)
    assert longer.tokens.tolist() == [[2, 3, 4, 5, 6]]
    assert longer.present.all()
    assert longer.place.tolist() == [4]
    assert shorter.tokens.tolist() == [[2, 3, 7, 8]]
    (both,) = found.behind(np.array([0, 1]), 10)
    assert both.rows.tokens[both.index.tolist().index(1)].tolist()[:4] == [2, 3, 7, 8]
    assert both.rows.present.sum().item() == 9
    assert sorted(both.rows.place.tolist()) == [3, 9]


def test_turns_end_where_the_next_sampled_token_of_a_row_is_not_the_next_token() -> None:
    batch = batch_of(fragment(GIVEN))
    valid = batch.valid.clone()
    valid[2, 0] = False
    found = read_responses(replace(batch, valid=valid))
    assert found is not None
    assert found.turn_ends.tolist() == [True, False, False, False, False]
    assert not read().turn_ends.any()
