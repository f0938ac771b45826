"""Columns as a fragment, checked as broker and learner do, and read as the losses read it."""

import numpy as np
import pytest

from penstock.actor.rollout.generator import HeaderFields
from penstock.config.settings import ConfigurationError
from penstock.learner.algorithms.responses import Grid, read_responses
from penstock.learner.batch import check_meaning
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import TensorRule, fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import Column, ColumnFragments
from tests.support.experience.token_experience import batch_of
from tests.support.language.columns import CUT, NONE, TWO

SCHEMA = fragment_schema(Discrete(12), Discrete(12))
FIELDS = HeaderFields(
    run="r", session=1, sequence=1, weights=Publication(version=4, update=3, sha256="", size=0), round=0
)


def cut(*columns: Column) -> Fragment:
    """Which the broker takes, and the learner."""
    made, _ = ColumnFragments(SCHEMA, len(columns), 0).cut(columns, FIELDS)
    check(made, SCHEMA, "r")
    check_meaning(made.header, made.arrays())
    return made


def test_a_conversation_is_one_row_of_the_learner() -> None:
    found = read_responses(batch_of(cut(TWO, CUT, NONE)))
    assert found is not None
    assert found.action.tolist() == [9, 2, 11, 9]
    assert found.reward.tolist() == [0.0, 0.5, 1.0, -1.0]
    assert found.turn_ends.tolist() == [False, True, False, False]
    assert found.cut_short.tolist() == [False, True]
    assert Grid(found).spread(found.reward).tolist() == [[0.0, -1.0], [0.5, 0.0], [1.0, 0.0]]


@pytest.mark.promise("trained-conversation-sampled-later")
def test_the_header_names_the_version_of_each_turn() -> None:
    assert {(span.slot, span.version) for span in cut(TWO, CUT).header.weights} == {(0, 3), (1, 4)}
    assert cut(TWO, CUT).header.oldest_update == 2
    assert [span.version for span in cut(NONE).header.weights] == [4]


def test_episodes_are_told_with_all_that_they_earned() -> None:
    _, episodes = ColumnFragments(SCHEMA, 3, 0).cut([TWO, CUT, NONE], FIELDS)
    told = sorted((one.slot_id, one.episode_return, one.length, one.terminated) for one in episodes)
    np.testing.assert_equal(told, [(0, 1.5, 3, True), (1, -1.0, 1, False)])


def test_a_tensor_that_columns_do_not_have_is_refused() -> None:
    extra = fragment_schema(Discrete(12), Discrete(12), (TensorRule(name="extra/other", dtype="float32"),))
    with pytest.raises(ConfigurationError, match=r"tensors \['extra/other'\]"):
        ColumnFragments(extra, 1, 0)
