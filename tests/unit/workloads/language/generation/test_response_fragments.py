"""A batch of responses as a fragment: each token where the convention says, checked as the broker does."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.actor.acting.masks import learner_reward
from penstock.actor.rollout.generator import HeaderFields
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import FragmentSchema, TensorRule, fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.cached_generation import Generated
from penstock.workloads.language.conversation import ColumnFragments
from penstock.workloads.language.reward.reward_source import ScoredBy
from penstock.workloads.rlhf.responses import PromptTokens, columns_of

PAD, EOS = 0, 2
VOCABULARY = Discrete(20)
ASKED = (
    PromptTokens(7, "a", (1, 10)),
    PromptTokens(7, "a", (1, 10)),
    PromptTokens(3, "b", (1, 11, 12, 13)),
    PromptTokens(4, "c", (1,)),
)
GENERATED = Generated(
    tokens=np.array([[14, 15, EOS], [16, 17, 18], [EOS, PAD, PAD], [14, 14, 14]]),
    log_prob=np.array([[-1, -2, -3], [-4, -5, -6], [-7, 0, 0], [-8, -9, -10]], np.float32),
    lengths=np.array([3, 3, 1, 3]),
    ended=np.array([True, False, True, False]),
    whole=np.array([True, True, True, True]),
)
BY = ScoredBy(name="judge", sha256="ab")


def schema(*extra: TensorRule) -> FragmentSchema:
    """Of token rows."""
    return fragment_schema(VOCABULARY, VOCABULARY, extra)


def fields(sequence: int = 1) -> HeaderFields:
    """Of version 5."""
    publication = Publication(version=5, update=4, sha256="", size=0)
    return HeaderFields(run="r", session=1, sequence=sequence, weights=publication, round=0)


def cut_scored(
    fragments: ColumnFragments,
    rewards: tuple[float | None, ...],
    header: HeaderFields,
    generated: Generated = GENERATED,
) -> tuple[Fragment, list[Episode]]:
    columns, attributes = columns_of(ASKED, generated, rewards, BY, header.weights)
    return fragments.cut(columns, header, attributes)


def cut(
    rewards: tuple[float | None, ...], generated: Generated = GENERATED
) -> tuple[Fragment, list[Episode]]:
    """One fragment, which the broker would take."""
    fragment, episodes = cut_scored(ColumnFragments(schema(), 4, PAD), rewards, fields(), generated)
    check(fragment, schema(), "r")
    return fragment, episodes


def test_every_token_is_where_the_convention_says() -> None:
    fragment, _ = cut((0.0, -1.0, 0.5, None))
    arrays: dict[str, Any] = fragment.arrays()
    assert fragment.header.steps == 4
    np.testing.assert_array_equal(
        arrays["observation"].T,
        [[1, 10, 14, 15, EOS], [1, 10, 16, 17, 18], [1, 11, 12, 13, EOS], [1, 14, 14, 14, PAD]],
    )
    np.testing.assert_array_equal(arrays["action"], arrays["observation"][1:])
    valid = [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(arrays["valid"].T, np.array(valid, bool))
    np.testing.assert_array_equal(
        arrays["log_prob"].T, [[0, -1, -2, -3], [0, -4, -5, -6], [0, 0, 0, -7], [0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(arrays["reward"].T[:, 3], [0.0, -1.0, 0.5, 0.0])
    assert not arrays["reward"][:3].any()
    np.testing.assert_array_equal(arrays["terminated"].T[:, 3], [True, False, True, False])
    np.testing.assert_array_equal(arrays["truncated"].T[:, 3], [False, True, False, False])
    np.testing.assert_array_equal(arrays["final/slot"], [0, 1, 2])
    np.testing.assert_array_equal(arrays["final/observation"], [EOS, 18, EOS])
    assert [(span.version, span.update) for span in fragment.header.weights] == [(5, 4)]


def test_rewards_of_zero_and_of_minus_one_are_rewards() -> None:
    _, episodes = cut((0.0, -1.0, 0.5, None))
    assert [(one.slot_id, one.episode_return, one.length, one.terminated) for one in episodes] == [
        (0, 0.0, 3, True), (1, -1.0, 3, False), (2, 0.5, 1, True),
    ]  # fmt: skip


def test_every_response_is_an_episode_of_its_own() -> None:
    fragments = ColumnFragments(schema(), 4, PAD)
    first, _ = cut_scored(fragments, (1.0, 1.0, 1.0, None), fields())
    second, episodes = cut_scored(fragments, (1.0, 1.0, 1.0, 1.0), fields(2))
    assert [slot.episode_id for slot in first.header.slots] == [0, 0, 0, 0]
    assert [slot.episode_id for slot in second.header.slots] == [1, 1, 1, 0]
    assert {slot.first_step for slot in second.header.slots} == {0}
    assert {one.slot_id: one.length for one in episodes} == {0: 3, 1: 3, 2: 1, 3: 3}


def test_a_batch_that_never_began_is_a_fragment_that_is_valid_nowhere() -> None:
    nothing = Generated(
        tokens=np.zeros((4, 0), np.int64), log_prob=np.zeros((4, 0), np.float32),
        lengths=np.zeros(4, np.int64), ended=np.zeros(4, bool), whole=np.zeros(4, bool),
    )  # fmt: skip
    fragment, episodes = cut((None, None, None, None), nothing)
    assert not episodes
    assert not fragment.arrays()["valid"].any()


def test_the_header_says_whose_rewards_they_are() -> None:
    said = json.loads(cut((0.0, 1.0, None, None))[0].header.attributes)
    assert said == {
        "finish": {"eos": 2, "length": 2},
        "unrewarded": 2,
        "reward": {"name": "judge", "sha256": "ab"},
        "prompts": [7, 7, 3, 4],
    }


def test_wrappers_change_what_the_learner_is_given_and_no_return() -> None:
    section = EnvironmentSection.model_validate({"reward": [{"scale": 2.0}]})
    fragments = ColumnFragments(schema(), 4, PAD, learner_reward(section))
    fragment, episodes = cut_scored(fragments, (0.5, -0.5, 1.0, None), fields())
    np.testing.assert_array_equal(fragment.arrays()["reward"].T[:, 3], [1.0, -1.0, 2.0, 0.0])
    assert [one.episode_return for one in episodes] == [0.5, -0.5, 1.0]


def test_a_tensor_that_responses_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tensors \['extra/other'\]"):
        ColumnFragments(schema(TensorRule(name="extra/other", dtype="float32")), 4, PAD)
