"""The best text on a policy's way."""

from collections.abc import Sequence

import pytest

from penstock.workloads.prompts.categories import QualityReward
from penstock.workloads.prompts.features import PromptError, mutate
from penstock.workloads.prompts.optimise import Choose, HashingEmbedder, Optimised, optimise

PROMPT = "Please, write a Python script."


def saying(*actions: int) -> Choose:
    """A policy that makes these mutations, one after another."""
    left = list(actions)

    def choose(embedding: Sequence[float], mask: Sequence[bool]) -> int:
        assert len(embedding) == 1536
        assert len(mask) == 5
        return left.pop(0)

    return choose


def best(*actions: int, prompt: str = PROMPT, steps: int | None = None) -> Optimised:
    """What these mutations lead to."""
    count = len(actions) if steps is None else steps
    return optimise(
        prompt, steps=count, choose=saying(*actions), embedder=HashingEmbedder(), reward=QualityReward()
    )


def test_a_step_that_costs_is_kept_where_a_later_one_pays_for_it() -> None:
    found = best(4, 2)
    assert [step.mutation_type for step in found.path] == ["task-decomposition", "expansion"]
    assert found.path[0].reward < 0 < found.reward == pytest.approx(sum(step.reward for step in found.path))
    assert found.prompt == mutate(mutate(PROMPT, 4), 2) == found.path[-1].prompt


def test_what_comes_behind_the_best_text_is_left_out() -> None:
    found = best(1, 3, 4)
    assert [step.action for step in found.path] == [1, 3]
    assert found.seen == 3


def test_nothing_better_is_the_prompt_itself() -> None:
    assert best(3, prompt="Write a poem.") == Optimised("Write a poem.", 0.0, (), 1)


def test_it_ends_at_the_first_step_that_changes_nothing() -> None:
    assert best(1, 1, steps=8).seen == 2


@pytest.mark.parametrize("steps", [0, 9, -1, True, 2.0, "3"])
def test_other_numbers_of_steps_are_refused(steps: int) -> None:
    with pytest.raises(PromptError, match="steps=.*: must be a number from 1 to 8"):
        best(1, steps=steps)


def test_an_action_that_is_none_is_refused() -> None:
    with pytest.raises(PromptError, match="the policy's action=7: is no mutation"):
        best(7)
