"""What a reward model learns from: scored responses, and pairs of which one is better."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.prompt import Prompt, identity, parse_prompt

# ---- Scores of a source's own scale, mapped to [−1, 1].

_THUMBS: Final[dict[str, float]] = {"up": 1.0, "down": -1.0}


@dataclass(frozen=True, slots=True)
class Scale:
    """A declared mapping. name: as it was declared, kept beside what was learned by it."""

    name: str
    to_score: Callable[[Any], float]
    """A raw score, normalised; raises ValueError that says why it is none of this scale."""


def parse_scale(name: str) -> Scale:
    """Return the scale of that name; raises ValueError that lists the names."""
    if name == "thumbs":
        return Scale(name, _thumb)
    if name == "none":
        return Scale(name, _number)
    bounds = {"stars": (1.0, 5.0), "percent": (0.0, 100.0)}.get(name) or _bounds(name)
    return Scale(name, lambda value: _within(value, *bounds, name=name))


def _bounds(name: str) -> tuple[float, float]:
    low, _, high = name.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1]) and bounds[0] < bounds[1]):
        raise ValueError(f"scale={name!r}: use thumbs, stars, percent, LOW:HIGH (such as 0:10), or none")
    return bounds


def _within(value: Any, low: float, high: float, *, name: str) -> float:
    number = _number(value)
    if not low <= number <= high:
        raise ValueError(f"score={number:g} is outside {low:g} to {high:g} (scale {name})")
    return 2 * (number - low) / (high - low) - 1


def _thumb(value: Any) -> float:
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if isinstance(value, str) and value.lower() in _THUMBS:
        return _THUMBS[value.lower()]
    if isinstance(value, int | float) and value in (1, -1):
        return float(value)
    # A 0 is a thumb down to some and no opinion to others.
    raise ValueError(
        f"score={value!r} is no thumb: use true, false, 1, -1, up or down (for 0 and 1 scale 0:1)"
    )


def _number(value: Any) -> float:
    if value is None:
        raise ValueError("no score")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"score={value!r} is {type(value).__name__}, not a number")  # noqa: TRY004
    if not math.isfinite(value):
        raise ValueError(f"score={value} is not finite")
    return float(value)


SHOWN: Final = 10
"""Bad rows that are kept with their place; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A response and what it is worth. score: normalised; raw: as its source gave it. where: for messages."""

    prompt: Prompt
    response: str
    score: float
    raw: Any
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A response that is better than another one to the same prompt."""

    prompt: Prompt
    chosen: str
    rejected: str
    where: str


@dataclass(slots=True, kw_only=True)
class Judged:
    """What one rater said of a response. shares: 0 to 1, by what is rated; what is unrated is left out."""

    prompt: Prompt
    response: str
    where: str
    shares: dict[str, float] = field(default_factory=dict)


Example = Scored | Preference | Judged


@dataclass(slots=True)
class BadRows:
    """Rows that cannot be used: all are counted, the first SHOWN kept with place and reason."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        rest = self.count - len(self.shown)
        return [*self.shown, *([f"… and {rest} more bad rows"] if rest else [])]


def to_example(row: Mapping[str, Any], scale: Scale, where: str) -> Example:
    """The example in a row with `prompt` and either `response` and `score`, or `chosen` and `rejected`."""
    prompt = parse_prompt(_present(row, "prompt"))
    is_pair = row.get("chosen") is not None or row.get("rejected") is not None
    if is_pair and row.get("score") is not None:
        raise ValueError("holds a score and a pair: make two rows of it")
    if is_pair:
        return preference_of(row, prompt, where)
    response = response_of(row, "response")
    raw = _present(row, "score")
    return Scored(prompt=prompt, response=response, score=scale.to_score(raw), raw=raw, where=where)


def preference_of(row: Mapping[str, Any], prompt: Prompt, where: str) -> Preference:
    chosen, rejected = response_of(row, "chosen"), response_of(row, "rejected")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, where=where)


def summary(examples: Sequence[Example]) -> dict[str, int]:
    kinds = Counter(type(example).__name__ for example in examples)
    return {"scored": kinds["Scored"], "pairs": kinds["Preference"]}


def _present(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"no {name}")
    return row[name]


def response_of(row: Mapping[str, Any], name: str) -> str:
    """Return a response as text, also where it is a conversation of one message; raises ValueError."""
    value = _present(row, name)
    if isinstance(value, str):
        return value
    turns = parse_prompt(value)
    if isinstance(turns, str) or len(turns) != 1:
        raise ValueError(f"{name} holds {len(turns)} messages: give the last alone, the others in `prompt`")
    return turns[0].content


# ---- Training and validation examples that share no prompt.


class Split(NamedTuple):
    """Both in the order of the source."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]


def split(examples: Sequence[Example], *, share: float, seed: int) -> Split:
    """`share` of the examples, to within those of one prompt, for validation; 0: none."""
    if share == 0:
        return Split(tuple(examples), ())
    of_prompt: dict[str, int] = defaultdict(int)
    for example in examples:
        of_prompt[identity(example.prompt)] += 1
    if len(of_prompt) < 2:
        raise ConfigurationError(
            "all examples are of one prompt, which cannot be on both sides: give more prompts, or "
            "validation_share=0"
        )
    held: set[str] = set()
    count = 0
    for prompt in sorted(of_prompt, key=lambda prompt: place_of(prompt, seed))[:-1]:
        if count >= share * len(examples):
            break
        held.add(prompt)
        count += of_prompt[prompt]
    sides: tuple[list[Example], list[Example]] = [], []
    for example in examples:
        sides[identity(example.prompt) in held].append(example)
    return Split(tuple(sides[0]), tuple(sides[1]))


def place_of(prompt: str, seed: int) -> bytes:
    """Return what the order of prompts goes by, of a prompt's `identity`."""
    return hashlib.sha256(f"{seed}\n{prompt}".encode()).digest()
