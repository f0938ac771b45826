"""Five readable features of a prompt: what each mutation would add, and whether it is there already.

A feature is there when the mutation's own section stands below the body, or when the body says as much in
words of its own: "for example", a numbered list, "at most 200 words".
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from penstock.workloads.prompts.prompt_text import CONSTRAINTS, EXAMPLES, FALLBACK, STEPS, Parts, take_apart


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
"""Leaving out words may bring others together that are left out as well; text that nests deeper is kept."""
_CACHED_BODIES: Final = 128
"""A body stays while sections are added to it."""
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Features:
    """Five yes-or-no features of a prompt, in the order of `mutations.MUTATION_TYPES`.

    A mutation whose feature is there changes nothing.

    fallback: it says what to do where something cannot be done. lean: it has no words that could be left out.
    examples: it asks for detail or examples. constraints: it sets bounds. steps: it splits the task.
    """

    fallback: bool
    lean: bool
    examples: bool
    constraints: bool
    steps: bool

    def there(self) -> tuple[bool, ...]:
        """Return the five, by the number of the mutation."""
        return self.fallback, self.lean, self.examples, self.constraints, self.steps


def features_of(prompt: str) -> Features:
    """Return the features of a prompt that `read_prompt` returned."""
    return features_of_parts(take_apart(prompt))


def features_of_parts(parts: Parts) -> Features:
    """Return the features of a prompt taken apart."""
    body, sections = _of_body(parts.body), parts.sections
    return Features(
        fallback=body.fallback or FALLBACK in sections,
        lean=body.lean,
        examples=body.examples or EXAMPLES in sections,
        constraints=body.constraints or CONSTRAINTS in sections,
        steps=body.steps or STEPS in sections,
    )


@lru_cache(_CACHED_BODIES)
def _of_body(body: str) -> Features:
    return Features(
        fallback=_says(body, FALLBACK),
        lean=without_padding(body) == body,
        examples=_says(body, EXAMPLES),
        constraints=_says(body, CONSTRAINTS),
        steps=_says(body, STEPS),
    )


def token_count(prompt: str) -> int:
    """Return how long a prompt is: its words, numbers and marks."""
    parts = take_apart(prompt)
    return sum(map(_tokens, (parts.body, *parts.sections)))


@lru_cache(_CACHED_BODIES)
def _tokens(text: str) -> int:
    return len(_TOKEN.findall(text))


def without_padding(body: str) -> str:
    """Return a body without polite words, empty phrases and lines that are said twice.

    Where that would change another feature or the order of the sections, leave nothing, or go on and on, it
    is returned as it is.
    """
    lean = body
    for _ in range(_PASSES):
        shorter = _shortened(lean)
        if shorter == lean:
            return lean if _means_as_much(lean, body) else body
        lean = shorter
    return body


def _means_as_much(lean: str, body: str) -> bool:
    if not lean or take_apart(lean).sections:
        return False
    return all(bool(says.search(lean)) == bool(says.search(body)) for says in _SAYS.values())


def _says(body: str, section: str) -> bool:
    return _SAYS[section].search(body) is not None


def _shortened(body: str) -> str:
    seen, lines = set[str](), []
    for line in body.split("\n"):
        bare = re.sub(r"[ \t]+", " ", _PADDING.sub("", line)).strip(" \t")
        bare = re.sub(r" ([,.;:!?])", r"\1", bare).lstrip(",.;! ")
        if line.strip() and (not bare or bare in seen):
            continue
        if bare:
            seen.add(bare)
        lines.append(_capitalised(bare) if bare != line.strip() else bare)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _capitalised(line: str) -> str:
    return line[:1].upper() + line[1:]
