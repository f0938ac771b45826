"""The best text that a policy's mutations lead to from a prompt, with the way there.

The policy is asked as a function, so that a server, a folder and a test can answer; nothing here loads a
model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.workloads.prompts.embeddings import Embedder
from penstock.workloads.prompts.mutations import MUTATION_TYPES, check_action, mutate, offered
from penstock.workloads.prompts.prompt_reward import PromptReward
from penstock.workloads.prompts.prompt_text import PromptError, read_prompt

MAX_STEPS: Final = 8
"""Most steps of one search."""

Choose = Callable[[Sequence[float], Sequence[bool]], int]
"""(embedding, 1,536 numbers; mask of the mutations that are offered) → number of the mutation to make."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of the way: what was done, what it earned, and the text after it."""

    action: int
    mutation_type: str
    reward: float
    prompt: str


@dataclass(frozen=True, slots=True)
class Optimised:
    """The best text that was seen.

    prompt: that text. reward: the sum of the rewards on the way to it, 0 where nothing better was seen. path:
    the steps to it, in order; steps that changed nothing are left out. seen: steps that were tried in all.
    """

    prompt: str
    reward: float
    path: tuple[PathStep, ...]
    seen: int


def optimise(
    prompt: str, *, steps: int, choose: Choose, embedder: Embedder, reward: PromptReward
) -> Optimised:
    """Follow a policy from a prompt and return the best text on its way.

    Args:
        prompt: where to begin.
        steps: most mutations, 1 to MAX_STEPS. It ends earlier at the first one that changes nothing, since a
            policy that sees the text alone would go on choosing it.
        choose: the policy, at its most likely action.
        embedder: what turns texts into what the policy sees.
        reward: what a step earns.

    Raises:
        PromptError: a text that is no prompt, another number of steps, or an action of `choose` that is none.
        EmbeddingError: the embeddings could not be had.
    """
    start = text = read_prompt(prompt)
    _check_steps(steps)
    way: list[PathStep] = []
    total = best = 0.0
    kept = seen = 0
    for _ in range(steps):
        action = int(choose(embedder.embed([text])[0].tolist(), offered(text)))
        check_action(action, "the policy's action")
        after = mutate(text, action)
        seen += 1
        if after == text:
            break
        earned = reward.of(start, text, after)
        way.append(PathStep(action, MUTATION_TYPES[action], earned, after))
        text, total = after, total + earned
        if total > best:
            best, kept = total, len(way)
    path = tuple(way[:kept])
    return Optimised(path[-1].prompt if path else start, best, path, seen)


def _check_steps(steps: object) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MAX_STEPS:
        raise PromptError(f"steps={steps!r}: must be a number from 1 to {MAX_STEPS}")
