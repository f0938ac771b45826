"""A conversation as a column: each token where the convention says."""

import numpy as np
import pytest

from penstock.protocol.fragment import WeightSpan
from penstock.workloads.language.conversation import column_tensors, weight_spans
from tests.support.language.columns import CUT, NONE, TWO

PAD = 0


def test_tokens_of_the_assistant_are_valid_and_each_turn_is_rewarded_at_its_last() -> None:
    made = column_tensors([TWO, CUT, NONE], PAD)
    np.testing.assert_array_equal(made["observation"][:, 0], TWO.ids)
    np.testing.assert_array_equal(made["observation"][:, 1], [5, 6, 9, *[PAD] * 6])
    np.testing.assert_array_equal(made["action"], made["observation"][1:])
    np.testing.assert_array_equal(made["valid"][:, 0], np.array([0, 0, 1, 1, 0, 0, 0, 1], bool))
    np.testing.assert_array_equal(made["log_prob"][:, 0], [0, 0, -1, -2, 0, 0, 0, -3])
    np.testing.assert_array_equal(made["reward"][:, 0], [0, 0, 0, 0.5, 0, 0, 0, 1])
    assert not made["valid"][:, 2].any()


def test_a_column_has_one_end_at_its_last_sampled_token() -> None:
    made = column_tensors([TWO, CUT, NONE], PAD)
    assert np.argwhere(made["terminated"]).tolist() == [[7, 0]]
    assert np.argwhere(made["truncated"]).tolist() == [[1, 1]]
    assert list(zip(made["final/step"], made["final/slot"], strict=True)) == [(1, 1), (7, 0)]
    np.testing.assert_array_equal(made["final/observation"], [9, 11])


def test_each_turn_keeps_the_version_that_sampled_it() -> None:
    assert weight_spans([TWO, NONE], 8) == (WeightSpan(0, 0, 8, 3, 2),)
    assert weight_spans([TWO, CUT], 8) == (
        WeightSpan(0, 2, 2, 3, 2), WeightSpan(0, 7, 1, 3, 2), WeightSpan(1, 1, 1, 4, 3),
    )  # fmt: skip
    with pytest.raises(ValueError, match="nothing was sampled"):
        weight_spans([NONE], 1)
