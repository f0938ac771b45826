"""What a prompt may be, and the sections that mutations add below it.

A prompt is a *body*, which somebody wrote, and below it at most one section of each kind in a fixed order,
separated by empty lines. So the order in which mutations are applied does not change the text that they lead
to.
"""

import unicodedata
from dataclasses import dataclass
from typing import Final

MAX_CHARACTERS: Final = 20_000
"""Length of the longest prompt that is read."""
_SEPARATOR: Final = "\n\n"

STEPS: Final = "Work in steps: first split the task into parts, then do one part after another, then check."
EXAMPLES: Final = "Go into detail, and give an example of each point."
CONSTRAINTS: Final = "Constraints: one page at most, one format throughout, nothing beside the matter."
FALLBACK: Final = "If something cannot be done, say so and suggest the nearest alternative."
SECTIONS: Final = (STEPS, EXAMPLES, CONSTRAINTS, FALLBACK)
"""The sections, in the order in which they stand below the body."""


class PromptError(ValueError):
    """A text that is no prompt. The message names the cause and what to do."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A prompt taken apart.

    body: what somebody wrote. sections: those of `SECTIONS` that stand below it.
    """

    body: str
    sections: frozenset[str] = frozenset()

    def text(self) -> str:
        """Return the prompt, put together."""
        return _SEPARATOR.join([self.body, *(one for one in SECTIONS if one in self.sections)])


def read_prompt(text: object, field: str = "prompt") -> str:
    """Return a prompt in the one form that the workload knows.

    Composed characters (Unicode NFC), lines that end in a line feed, no space around it.

    Args:
        text: what came.
        field: its name, for the message.

    Raises:
        PromptError: no text, only blanks, longer than MAX_CHARACTERS, or characters that no text has.
    """
    if not isinstance(text, str):
        raise PromptError(f"{field}: must be a text, is a {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"{field}: {len(text)} characters, at most {MAX_CHARACTERS}; send a shorter one")
    if "\0" in text or any("\ud800" <= one <= "\udfff" for one in text):
        raise PromptError(
            f"{field}: holds a null character or half of a surrogate pair; send well-formed Unicode"
        )
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    prompt = unicodedata.normalize("NFC", lines).strip()
    if not any(one.isprintable() and not one.isspace() for one in prompt):
        raise PromptError(f"{field}: is empty, or holds only blanks; write what is wanted")
    if len(prompt) > MAX_CHARACTERS:  # few characters have a longer composed form
        raise PromptError(f"{field}: {len(prompt)} characters when composed, at most {MAX_CHARACTERS}")
    return prompt


def take_apart(prompt: str) -> Parts:
    """Return body and sections of a prompt that `read_prompt` returned."""
    body, found = prompt, set[str]()
    for section in reversed(SECTIONS):
        rest = body.removesuffix(_SEPARATOR + section)
        if rest != body and rest.strip():
            body = rest
            found.add(section)
    return Parts(body, frozenset(found))
