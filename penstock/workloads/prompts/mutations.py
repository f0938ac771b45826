"""The five mutations, as functions of text.

Each is deterministic and idempotent, and their order does not matter: a prompt becomes at most 32 texts.

    0  try-catch-style      says what to do where something cannot be done
    1  context-reduction    leaves out what the task does not need
    2  expansion            asks for detail and examples
    3  constraint-addition  sets bounds
    4  task-decomposition   splits the task into steps
"""

from typing import Final

from penstock.workloads.prompts.features import features_of_parts, token_count, without_padding
from penstock.workloads.prompts.prompt_text import (
    CONSTRAINTS,
    EXAMPLES,
    FALLBACK,
    MAX_CHARACTERS,
    STEPS,
    Parts,
    PromptError,
    read_prompt,
    take_apart,
)

MUTATION_TYPES: Final = (
    "try-catch-style",
    "context-reduction",
    "expansion",
    "constraint-addition",
    "task-decomposition",
)
"""Names of the mutations, by the number of the action."""
LONGEST_TOKENS: Final = 400
"""Where a prompt is longer, masks offer no mutation that makes it longer still."""
_REDUCTION: Final = 1
_ADDED: Final = {0: FALLBACK, 2: EXAMPLES, 3: CONSTRAINTS, 4: STEPS}


def mutate(prompt: str, action: int) -> str:
    """Return the prompt that a mutation makes of a prompt.

    It is the same prompt where there is nothing to do, or where the text would become longer than any that
    is read.

    Args:
        prompt: what somebody wrote, or what a mutation made of it.
        action: number of the mutation, 0 to 4.

    Raises:
        PromptError: a text that is no prompt, or no such action.
    """
    check_action(action)
    original = read_prompt(prompt)
    parts = take_apart(original)
    if features_of_parts(parts).there()[action]:
        return original
    if action == _REDUCTION:
        return Parts(without_padding(parts.body), parts.sections).text()
    longer = Parts(parts.body, parts.sections | {_ADDED[action]}).text()
    return longer if len(longer) <= MAX_CHARACTERS else original


def check_action(action: object, field: str = "action") -> None:
    """Raise PromptError that names `field` for what is no number of a mutation."""
    if not isinstance(action, int) or isinstance(action, bool) or not 0 <= action < len(MUTATION_TYPES):
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(MUTATION_TYPES))
        raise PromptError(f"{field}={action!r}: is no mutation; choose one of {listed}")


def offered(prompt: str) -> tuple[bool, ...]:
    """Return which mutations a prompt implies: all of them, but for a long one those that lengthen it.

    There is always one that may be chosen. Raises PromptError for a text that is no prompt.
    """
    is_long = token_count(read_prompt(prompt)) >= LONGEST_TOKENS
    return tuple(action == _REDUCTION or not is_long for action in range(len(MUTATION_TYPES)))
