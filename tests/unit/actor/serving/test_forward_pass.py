"""One pass answers many requests, each as if it had been alone."""

from typing import Any, Final

import numpy as np
import pytest
from torch import nn

from penstock.actor.serving.batcher import Answer, Loaded, NotFinite, Question, answer
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from tests.support.serving.server_parts import broken, loaded_of, named, question_of, specification

REAL: Final = Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
ACTIONS: Final[dict[str, Space]] = {
    "choice": Discrete(3),
    "choices": MultiDiscrete((2, 3)),
    "bits": MultiBinary(3),
    "real": REAL,
    "nested": Dict((("move", Discrete(4)), ("force", REAL))),
}
NETWORKS: Final[dict[str, dict[str, Any]]] = {
    "tanh": {},
    "relu, shared": {"activation": "relu", "shared_trunk": True},
    "normalised": {"normalise_observations": True},
    "squashed": {"continuous": "squashed"},
}


def taken(given: Answer | NotFinite) -> Answer:
    """An answer that is one."""
    assert isinstance(given, Answer), given
    return given


@pytest.mark.promise("answer-comes-wholly-version")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_request_in_company_is_answered_as_alone(action: str, network: str) -> None:
    made = specification(action=ACTIONS[action], **NETWORKS[network])
    loaded = loaded_of(made)
    questions = [
        question_of(
            1 + i % 3,
            i,
            distribution=True,
            value=True,
            deterministic=i % 2 == 0,
            seed=i if i % 3 == 0 else None,
        )
        for i in range(17)
    ]
    for question, given in zip(questions, answer(loaded, questions), strict=True):
        together, alone = taken(given), taken(answer(loaded, [question])[0])
        assert together.loaded is loaded
        for name, expected in named(alone.distribution).items():
            np.testing.assert_allclose(named(together.distribution)[name], expected, atol=1e-5)
        assert together.value is not None
        assert alone.value is not None
        np.testing.assert_allclose(together.value, alone.value, atol=1e-5)
        expected = loaded.policy.acting_log_prob(question.observation, together.action)
        np.testing.assert_allclose(together.log_prob, expected, atol=1e-4)


def test_plain_requests_share_one_draw() -> None:
    made = specification()
    loaded = loaded_of(made)
    questions = [question_of(rows, rows) for rows in (1, 4, 2)]
    for question, given in zip(questions, answer(loaded, questions), strict=True):
        own = taken(given)
        assert own.action["action"].shape == (question.rows,)
        expected = loaded.policy.log_prob(question.observation, own.action)
        np.testing.assert_allclose(own.log_prob, expected, atol=1e-5)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_seed_gives_the_same_actions_again(action: str) -> None:
    made = specification(action=ACTIONS[action])
    asked = [question_of(40, 1, seed=11), question_of(40, 1, seed=12)]
    alone = taken(answer(loaded_of(made), asked[:1])[0])
    again, other = map(taken, answer(loaded_of(made), asked))
    actions: dict[str, Any] = dict(alone.action)
    for name, drawn in actions.items():
        np.testing.assert_allclose(again.action[name].astype(drawn.dtype), drawn, atol=1e-5)
    np.testing.assert_allclose(again.log_prob, alone.log_prob, atol=1e-4)
    assert any((other.action[name] != drawn).any() for name, drawn in actions.items())


def test_deterministic_requests_get_the_most_likely_action() -> None:
    loaded = loaded_of(specification())
    question = question_of(30, 2, deterministic=True, distribution=True)
    first, second = (taken(answer(loaded, [question])[0]) for _ in range(2))
    likeliest = named(first.distribution)["action/probability"].argmax(-1)
    assert first.action["action"].tolist() == likeliest.tolist() == second.action["action"].tolist()


# ---------------------------------------------------------------- masks


def masked(loaded: Loaded, rows: int, allowed: Any, **wishes: Any) -> Answer:
    """An answer under a mask."""
    masks = {"action": np.asarray(allowed, bool)}
    return taken(answer(loaded, [question_of(rows, 5, masks=masks, distribution=True, **wishes)])[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_masked_action_has_no_probability(deterministic: bool) -> None:
    loaded = loaded_of(specification())
    allowed = np.random.default_rng(3).random((2000, 3)) < 0.5
    allowed[:, 0] |= ~allowed.any(-1)
    given = masked(loaded, 2000, allowed, deterministic=deterministic)
    free = taken(answer(loaded, [question_of(2000, 5, distribution=True)])[0])
    full = named(free.distribution)["action/probability"] * allowed
    shares = named(given.distribution)["action/probability"]
    action = given.action["action"]
    assert (shares[~allowed] == 0).all()
    np.testing.assert_allclose(shares, full / full.sum(-1, keepdims=True), atol=1e-6)
    rows = np.arange(2000)
    assert allowed[rows, action].all()
    np.testing.assert_allclose(given.log_prob, np.log(shares[rows, action]), atol=1e-5)


def test_a_mask_is_not_the_neighbours() -> None:
    loaded = loaded_of(specification())
    masks = {"action": np.array([[True, False, False]] * 500)}
    hidden, free = answer(loaded, [question_of(500, 1, masks=masks), question_of(500, 1)])
    assert set(taken(hidden).action["action"].tolist()) == {0}
    assert set(taken(free).action["action"].tolist()) == {0, 1, 2}


# ---------------------------------------------------------------- numbers that are not finite


def test_an_observation_that_overflows_the_network_costs_no_other_request() -> None:
    loaded = loaded_of(specification(activation="relu"), version=9)
    huge = Question(observation={"observation": np.full((1, 4), 3e38, np.float32)}, rows=1)
    with np.errstate(all="ignore"):
        first, wrong, last = answer(loaded, [question_of(2, 1), huge, question_of(1, 2)])
    assert isinstance(wrong, NotFinite)
    assert "version 9" in str(wrong)
    assert taken(first).action["action"].shape == (2,)
    assert taken(last).action["action"].shape == (1,)


def test_weights_of_nan_answer_no_request() -> None:
    loaded = loaded_of(specification())
    broken(loaded.policy)
    questions = [question_of(), question_of(deterministic=True), question_of(distribution=True, value=True)]
    for given in answer(loaded, questions):
        assert isinstance(given, NotFinite)


def test_a_value_that_is_no_number_is_no_answer() -> None:
    loaded = loaded_of(specification())
    nn.init.constant_(loaded.policy.critic_head.bias, float("nan"))
    asked, plain = answer(loaded, [question_of(value=True), question_of()])
    assert isinstance(asked, NotFinite)
    assert taken(plain).value is None


def test_how_likely_another_action_was_is_asked_without_drawing() -> None:
    loaded = loaded_of(specification())
    action = {"action": np.array([0, 1, 2, 1])}
    question = question_of(4, 3, taken=action)
    given = taken(answer(loaded, [question])[0])
    expected = loaded.policy.log_prob(question.observation, action)
    np.testing.assert_allclose(given.log_prob, expected, atol=1e-5)
    broken(loaded.policy)
    assert isinstance(answer(loaded, [question])[0], NotFinite)
