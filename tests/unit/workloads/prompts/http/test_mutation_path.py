"""The best text on a policy's way."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.workloads.prompts.features import PromptError, mutate
from penstock.workloads.prompts.http.api_bodies import OptimizeAnswer
from penstock.workloads.prompts.http.prompt_routes import mutation_path
from penstock.workloads.prompts.http.prompts_api import PromptWork, ShownPaths
from penstock.workloads.prompts.task_parts import parts_of

PROMPT = "Please, write a Python script."


class Policy:
    """A run whose policy makes these mutations, one after another."""

    def __init__(self, *actions: int) -> None:
        self.left = list(actions)
        self.shown = ShownPaths()

    async def act(self, state: Any, *, mask: Any, **_options: bool) -> Any:
        """The next of them."""
        assert state.shape == (1536,)
        assert mask.shape == (5,)
        action = self.left.pop(0)
        return SimpleNamespace(
            action=action, version=1, log_prob=-1.0, distribution={"probability": np.full(5, 0.2)}
        )


def best(policy: Policy, *, prompt: str = PROMPT) -> OptimizeAnswer:
    """What its mutations lead to."""

    async def path() -> OptimizeAnswer:
        work, api = PromptWork(parts_of({})), policy
        steps = len(policy.left)
        return await mutation_path(api, work, "somebody", prompt, steps=steps, explore=False)  # type: ignore[arg-type]

    return asyncio.run(path())


def test_a_step_that_costs_is_kept_where_a_later_one_pays_for_it() -> None:
    found = best(Policy(4, 2))
    assert [step.mutation_type for step in found.path] == ["task-decomposition", "expansion"]
    rewards = [step.reward or 0.0 for step in found.path]
    assert found.reward is not None
    assert rewards[0] < 0 < found.reward == pytest.approx(sum(rewards))
    assert found.prompt == mutate(mutate(PROMPT, 4), 2) == found.path[-1].prompt


def test_what_comes_behind_the_best_text_is_left_out() -> None:
    policy = Policy(1, 3, 4)
    assert [step.action for step in best(policy).path] == [1, 3]
    assert policy.left == []


def test_nothing_better_is_the_prompt_itself() -> None:
    found = best(Policy(3), prompt="Write a poem.")
    assert (found.prompt, found.reward, found.path) == ("Write a poem.", 0.0, [])


def test_it_ends_at_the_first_step_that_changes_nothing() -> None:
    policy = Policy(1, 1, 3, 4)
    best(policy)
    assert policy.left == [3, 4]


def test_an_action_that_is_none_is_refused() -> None:
    with pytest.raises(PromptError, match="action=7: is no mutation"):
        best(Policy(7))
