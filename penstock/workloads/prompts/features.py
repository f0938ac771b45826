"""The five mutations of a prompt, and the five features that they add."""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

# ---- Valid prompts, and the sections that mutations append.

MAX_CHARACTERS: Final = 20_000
"""Length of the longest valid prompt."""
_SEPARATOR: Final = "\n\n"

STEPS: Final = "Work in steps: first split the task into parts, then do one part after another, then check."
EXAMPLES: Final = "Go into detail, and give an example of each point."
CONSTRAINTS: Final = "Constraints: one page at most, one format throughout, nothing beside the matter."
FALLBACK: Final = "If something cannot be done, say so and suggest the nearest alternative."
SECTIONS: Final = (STEPS, EXAMPLES, CONSTRAINTS, FALLBACK)
"""The sections, in the order in which they stand below the body."""


class PromptError(ValueError):
    """Reports an invalid prompt; the message names the cause and a remedy."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The user's own text, and the `SECTIONS` below it."""

    body: str
    sections: frozenset[str] = frozenset()

    def text(self) -> str:
        return _SEPARATOR.join([self.body, *(one for one in SECTIONS if one in self.sections)])


def read_prompt(text: object, field: str = "prompt") -> str:
    """Return a prompt in Unicode NFC, with line feeds and no space around it; raises PromptError."""
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
    if not _is_visible(prompt):
        raise PromptError(f"{field}: is empty, or holds only blanks; write what is wanted")
    if len(prompt) > MAX_CHARACTERS:  # few characters have a longer composed form
        raise PromptError(f"{field}: {len(prompt)} characters when composed, at most {MAX_CHARACTERS}")
    return prompt


def take_apart(prompt: str) -> Parts:
    body, found = prompt, set[str]()
    for section in reversed(SECTIONS):
        rest = body.removesuffix(_SEPARATOR + section)
        if rest != body and rest.strip():
            body = rest
            found.add(section)
    return Parts(body, frozenset(found))


def _words(*alternatives: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(alternatives)})\b", re.IGNORECASE)


_SAYS: Final = {
    FALLBACK: _words(
        r"if (?:you|this|that|it|something|anything)\b[^.?!\n]{0,40}\b(?:cannot|can't|can not|fails?)",
        r"if (?:you|this|that|it|something|anything)\b[^.?!\n]{0,40}\b(?:impossible|not sure|unsure|unknown)",
        r"otherwise (?:say|suggest|answer|return)",
        r"fall ?back",
        r"as an alternative",
        r"nearest alternative",
    ),
    EXAMPLES: _words(r"for (?:example|instance)", r"examples?", r"e\.g", r"such as", r"go into detail"),
    CONSTRAINTS: _words(
        r"constraints?",
        r"at (?:most|least) \w+",
        r"no (?:more|longer|fewer) than",
        r"must(?: not)?",
        r"only use",
        r"within \d+",
        r"do not (?:use|exceed)",
    ),
    STEPS: re.compile(
        r"\b(?:step by step|work in steps|in steps|first\b[^\n]{1,200}\bthen)\b|^\s*(?:1[.)]|step 1\b)",
        re.IGNORECASE | re.MULTILINE,
    ),
}
_PADDING: Final = re.compile(
    r"\b(?:please|kindly|basically|actually|really|just|very much|if you don't mind|if possible"
    r"|i was wondering (?:if|whether)|i would like you to|i want you to|as you (?:may )?know|needless to say"
    r"|at the end of the day|thank you(?: so much| very much)?(?: in advance)?"
    r"|thanks(?: a lot)?(?: in advance)?"
    r"|i hope (?:that )?(?:you are|this finds you|all is) well)\b[,.!]?",
    re.IGNORECASE,
)
_PASSES: Final = 8
"""Removing words may create further padding; text with more passes than this stays as it is."""
_CACHED_BODIES: Final = 128
"""Mutations often change the sections and leave the body as it is."""
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")


def features_of(prompt: str) -> tuple[bool, ...]:
    """Return five features of a prompt of `read_prompt`; with feature i, mutation i changes nothing.

    The prompt names a fallback, has no padding, asks for detail or examples, sets constraints, or splits the
    task into steps.
    """
    return features_of_parts(take_apart(prompt))


def features_of_parts(parts: Parts) -> tuple[bool, ...]:
    body = enumerate(_of_body(parts.body))
    return tuple(is_there or _ADDED.get(action) in parts.sections for action, is_there in body)


@lru_cache(_CACHED_BODIES)
def _of_body(body: str) -> tuple[bool, ...]:
    return tuple(
        without_padding(body) == body
        if action == _REDUCTION
        else _SAYS[_ADDED[action]].search(body) is not None
        for action in range(len(MUTATION_TYPES))
    )


def token_count(prompt: str) -> int:
    parts = take_apart(prompt)
    return sum(map(_tokens, (parts.body, *parts.sections)))


@lru_cache(_CACHED_BODIES)
def _tokens(text: str) -> int:
    return len(_TOKEN.findall(text))


def _is_visible(text: str) -> bool:
    return any(one.isprintable() and not one.isspace() for one in text)


def without_padding(body: str) -> str:
    """Return a body without polite words, empty phrases and repeated lines.

    It is returned unchanged where the removal would change another feature or the sections, leave no text, or
    need too many passes.
    """
    lean = body
    for _ in range(_PASSES):
        shorter = _shortened(lean)
        if shorter == lean:
            return lean if _means_as_much(lean, body) else body
        lean = shorter
    return body


def _means_as_much(lean: str, body: str) -> bool:
    if not _is_visible(lean) or take_apart(lean).sections:
        return False
    return all(bool(says.search(lean)) == bool(says.search(body)) for says in _SAYS.values())


def _shortened(body: str) -> str:
    seen, lines = set[str](), []
    for line in body.split("\n"):
        bare = re.sub(r"[ \t]+", " ", _PADDING.sub("", line)).strip(" \t")
        bare = re.sub(r" ([,.;:!?])", r"\1", bare).lstrip(",.;! ")
        if line.strip() and (not bare or bare in seen):
            continue
        if bare:
            seen.add(bare)
        lines.append(bare[:1].upper() + bare[1:] if bare != line.strip() else bare)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


# ---- The five mutations, as functions of text.

MUTATION_TYPES: Final = (
    "try-catch-style",
    "context-reduction",
    "expansion",
    "constraint-addition",
    "task-decomposition",
)
"""Names of the mutations, by the number of the action."""
LONGEST_TOKENS: Final = 400
"""From this length on, masks offer no mutation that makes a prompt longer."""
_REDUCTION: Final = 1
_ADDED: Final = {0: FALLBACK, 2: EXAMPLES, 3: CONSTRAINTS, 4: STEPS}


def mutate(prompt: str, action: int) -> str:
    """Return a prompt after mutation 0 to 4; unchanged where it has the feature, or would become too long."""
    if type(action) is not int or not 0 <= action < len(MUTATION_TYPES):
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(MUTATION_TYPES))
        raise PromptError(f"action={action!r}: is no mutation; choose one of {listed}")
    original = read_prompt(prompt)
    parts = take_apart(original)
    if features_of_parts(parts)[action]:
        return original
    if action == _REDUCTION:
        return Parts(without_padding(parts.body), parts.sections).text()
    longer = Parts(parts.body, parts.sections | {_ADDED[action]}).text()
    return longer if len(longer) <= MAX_CHARACTERS else original


def offered(prompt: str) -> tuple[bool, ...]:
    """Return which mutations are offered for a prompt: all, but for a long one none that lengthens it."""
    is_long = token_count(read_prompt(prompt)) >= LONGEST_TOKENS
    return tuple(action == _REDUCTION or not is_long for action in range(len(MUTATION_TYPES)))
