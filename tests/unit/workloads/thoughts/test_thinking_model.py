"""Thinking and answering: what is read where, beside passes of the network by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.workloads.thoughts.environment import Ids
from penstock.workloads.thoughts.model import ThinkingModel, answer_places, outputs
from penstock.workloads.thoughts.tasks import draw_tests
from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base, thinking_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ThinkingModel:
    """An untrained one."""
    policy = thinking_policy(small_base(tmp_path_factory.mktemp("model") / "base"))
    return ThinkingModel(policy.network, LAYOUT)


def thoughts_of(model: ThinkingModel, questions: list[Ids], most: int, **how: Any) -> list[Ids]:
    """Thoughts without their log-probabilities."""
    sampled = model.sample(questions, most, **how)
    assert sampled is not None
    return [thought for thought, _ in sampled]


def test_answers_are_read_behind_the_mark(model: ThinkingModel) -> None:
    examples = [*draw_tests(TASK, 0, 3), *draw_tests(TASK, 1, 2, level=1)]
    questions, answers = model.questions(examples), model.answers(examples)
    model.seed(3)
    thoughts = thoughts_of(model, questions, TOKENS)
    for given in (thoughts, None):
        together = model.answered(questions, given, answers)
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            row = (
                LAYOUT.direct(question, answer)
                if given is None
                else LAYOUT.thinking(question, given[number], answer)
            )
            logits = model.network(input_ids=torch.tensor([row])).logits[0, -2].log_softmax(-1)
            assert together.log_prob[number] == pytest.approx(float(logits[answer[0]].detach()), abs=1e-4)
            assert together.given[number] == (int(logits.argmax()),)
            assert together.is_right[number] == (int(logits.argmax()) == answer[0])


def test_a_mixing_head_weighs_answers_behind_thoughts_with_those_without(tmp_path: Path) -> None:
    base = small_base(tmp_path / "base")
    plain, mixing = (ThinkingModel(thinking_policy(base, mixing=width).network, LAYOUT) for width in (0, 8))
    examples = draw_tests(TASK, 0, 5)
    questions, answers = plain.questions(examples), plain.answers(examples)
    plain.seed(3)
    thoughts = thoughts_of(plain, questions, TOKENS)
    behind, without = (plain.answered(questions, given, answers).log_prob for given in (thoughts, None))
    found = mixing.answered(questions, thoughts, answers).log_prob
    assert found == pytest.approx(np.log((np.exp(behind) + np.exp(without)) / 2), abs=1e-5)
    assert mixing.answered(questions, None, answers).log_prob == pytest.approx(without, abs=1e-6)


def test_log_probabilities_are_those_that_were_sampled_with(model: ThinkingModel) -> None:
    questions = model.questions(draw_tests(TASK, 0, 6))
    model.seed(1)
    sampled = model.sample(questions, TOKENS)
    model.seed(1)
    assert model.sample(questions, TOKENS) == sampled
    assert sampled is not None
    for question, (thought, log_prob) in zip(questions, sampled, strict=True):
        assert len(log_prob) == len(thought) <= TOKENS
        rows = [LAYOUT.begun(question, thought)]
        with torch.no_grad():
            read = outputs(model.network, rows, answer_places(rows, [len(thought)]), LAYOUT.pad).log_probs
        again = read[range(len(thought)), list(thought)]
        assert log_prob == pytest.approx(again.tolist(), abs=1e-4)


def test_a_thought_that_was_begun_is_gone_on_with(model: ThinkingModel) -> None:
    questions = model.questions(draw_tests(TASK, 0, 2))
    begun = [LAYOUT.ids(("a",)), LAYOUT.ids(("b",))]
    thoughts = thoughts_of(model, questions, 2, begun=begun)
    assert [thought[:1] for thought in thoughts] == begun
    assert all(2 <= len(thought) <= 3 for thought in thoughts)


def test_thinking_that_is_interrupted_gives_nothing(model: ThinkingModel) -> None:
    assert model.sample(model.questions(draw_tests(TASK, 0, 2)), TOKENS, is_over=lambda: True) is None
