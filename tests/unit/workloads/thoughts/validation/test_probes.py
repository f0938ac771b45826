"""Probes of a model that knows nothing: which questions are disturbed."""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.workloads.thoughts.model import ThinkingModel
from penstock.workloads.thoughts.start import load_transformer
from penstock.workloads.thoughts.tasks import Continuation, Example, Rings, draw_tests
from penstock.workloads.thoughts.validation import Probed, probe
from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ThinkingModel:
    """Untrained."""
    return ThinkingModel(load_transformer(small_base(tmp_path_factory.mktemp("base"))), LAYOUT)


def probed(model: ThinkingModel, examples: list[Example]) -> Probed:
    """What comes of it."""
    return probe(model, TASK, examples, TOKENS)


def test_questions_that_need_no_step_are_left_out_of_mistakes(model: ThinkingModel) -> None:
    hard, easy = draw_tests(TASK, 0, 6), draw_tests(TASK, 0, 2, TASK.levels[0])
    assert {len(one.steps) for one in hard} == {2}
    assert {len(one.steps) for one in easy} == {0}
    mixed, alone = probed(model, [*hard, *easy]), probed(model, hard)
    for found in (mixed, alone):
        assert found.mistaken is not None
        assert len(found.mistaken) == 12
        assert found.kept_last is not None
        assert len(found.kept_last) == 6
    assert len(mixed.gain) == 8


def test_thoughts_of_differing_length_are_disturbed_at_each_of_their_steps(model: ThinkingModel) -> None:
    examples = [*draw_tests(TASK, 0, 3), *draw_tests(TASK, 0, 3, TASK.levels[1])]
    found = probed(model, examples)
    assert found.mistaken is not None
    assert len(found.mistaken) == 9
    assert found.mistaken_of is not None
    assert np.bincount(found.mistaken_of).tolist() == [2, 2, 2, 1, 1, 1]


def test_where_no_question_needs_a_step_nothing_is_disturbed(model: ThinkingModel) -> None:
    found = probed(model, draw_tests(TASK, 0, 4, TASK.levels[0]))
    assert (found.mistaken, found.last_mistaken, found.kept_last, found.without_last) == (None,) * 4
    assert found.mistaken_of is None
    assert np.isfinite(found.gain).all()


class Detours(Rings):
    """Rings in which every wrong step leads onto a way of two steps more than the legal one has."""

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """As rings has it, and two symbols more behind a wrong step."""
        whole, left = super().resume(question, ()), super().resume(question, thought)
        assert whole is not None
        if left is None or tuple(thought) == whole.steps[: len(thought)]:
            return left
        return Continuation((*left.steps, *self.symbols[:2]), left.answer)


@pytest.mark.parametrize(("most", "counted"), [(3, None), (4, 12)])
def test_mistakes_from_which_a_thought_is_too_short_to_go_on_do_not_count(
    model: ThinkingModel, most: int, counted: int | None
) -> None:
    task = Detours(6, 3)
    found = probe(model, task, draw_tests(task, 0, 6), most)
    assert (None if found.mistaken is None else len(found.mistaken)) == counted
    assert found.last_mistaken is None
