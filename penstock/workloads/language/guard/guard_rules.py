r"""Patterns of texts that do not pass: built in, and of a file of one's own.

    [[rule]]
    name = "card_number"
    pattern = '\b(?:\d[ -]?){13,19}\b'
    on = ["input", "output"]              # default: both

A text is folded before it is matched: compatible letters are one (NFKC), letters are small, invisible
characters are gone, and blanks are single. So write patterns in small letters.
"""

import re
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.guard.verdict import Direction

MAX_RULES: Final = 256
_UNSEEN: Final = {"Cf", "Cc"}
_IGNORABLE: Final = frozenset(
    chr(one)
    for first, last in (
        (0x034F, 0x034F),
        (0x115F, 0x1160),
        (0x17B4, 0x17B5),
        (0x180B, 0x180F),
        (0x2065, 0x2065),
        (0x3164, 0x3164),
        (0xFE00, 0xFE0F),
        (0xFFA0, 0xFFA0),
        (0xFFF0, 0xFFF8),
        (0xE0000, 0xE0FFF),
    )
    for one in range(first, last + 1)
)
"""Letters and marks that are not seen: of Unicode's Default_Ignorable_Code_Point, what is not in _UNSEEN."""
_BOTH: Final = frozenset(Direction)


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that blocks. on: whose texts it is for."""

    name: str
    pattern: re.Pattern[str]
    on: frozenset[Direction] = _BOTH


BUILT_IN: Final = (
    Rule(
        "other_instructions",
        re.compile(
            r"\b(?:ignore|disregard|forget|override)\b[^.!?]{0,40}"
            r"\b(?:previous|prior|above|earlier|your|all)\b[^.!?]{0,20}\b(?:instructions?|rules|prompts?)\b"
        ),
        frozenset({Direction.INPUT}),
    ),
    Rule(
        "system_prompt",
        re.compile(
            r"\b(?:reveal|print|show|repeat|leak|tell)\b[^.!?]{0,40}\b(?:system|hidden|developer) "
            r"(?:prompt|message|instructions?)\b"
        ),
        frozenset({Direction.INPUT}),
    ),
    Rule("private_key", re.compile(r"-----begin (?:[a-z]+ ){0,2}private key-----")),
)
"""What blocks without a file."""


def fold(text: str) -> str:
    """Return a text as patterns see it."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    # Once more, for a mark may belong to the letter that stood before something invisible.
    seen = unicodedata.normalize("NFKC", "".join(one for one in plain if _is_seen(one)))
    return " ".join(seen.split())


def _is_seen(one: str) -> bool:
    return one.isspace() or (unicodedata.category(one) not in _UNSEEN and one not in _IGNORABLE)


def matched(text: str, direction: Direction, rules: Sequence[Rule]) -> str:
    """Return the name of the first rule that a folded text breaks; "" where none is."""
    for rule in rules:
        if direction in rule.on and rule.pattern.search(text):
            return rule.name
    return ""


def read_rules(file: Path, named: str) -> tuple[Rule, ...]:
    """Return the rules of a file, in its order.

    named: the option or the setting that names the file. Raises ConfigurationError that names the rule and
    what is wrong with it.
    """
    where = f"{named}={str(file)!r}"
    try:
        given = tomllib.loads(file.read_text()).get("rule", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{where}: cannot be read: {error}") from error
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_RULES:
        raise ConfigurationError(f"{where}: write 1 to {MAX_RULES} tables [[rule]]")
    return tuple(_rule(one, f"{where}: rule {number}") for number, one in enumerate(given, 1))


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, dict) or given.keys() - {"name", "pattern", "on"}:
        raise ConfigurationError(f"{where}: has name, pattern and on, and nothing else")
    name, pattern, on = given.get("name"), given.get("pattern"), given.get("on", list(_BOTH))
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_]{1,64}", name):
        raise ConfigurationError(f"{where}: name={name!r}: use 1 to 64 of a-z, 0-9 and _")
    if not isinstance(on, list) or not on or not set(on) <= {one.value for one in Direction}:
        raise ConfigurationError(f'{where}: on={on!r}: use "input", "output" or both')
    try:
        compiled = re.compile(pattern if isinstance(pattern, str) else "")
    except re.error as error:
        raise ConfigurationError(f"{where}: pattern={pattern!r}: is no pattern: {error}") from error
    if not isinstance(pattern, str) or compiled.search(""):
        raise ConfigurationError(f"{where}: pattern={pattern!r}: must be text that does not match everything")
    return Rule(name, compiled, frozenset(map(Direction, on)))
