"""What a reward model learns from: scored responses, and pairs of which one is better."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.workloads.language.feedback.scale import Scale
from penstock.workloads.language.prompt import Prompt, parse_prompt

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


Example = Scored | Preference


@dataclass(slots=True)
class BadRows:
    """Rows that cannot be used.

    Each is counted under its kind of reason; the first SHOWN are kept with place and reason.
    """

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        """Count an example."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        """Return what to tell the user."""
        rest = self.count - len(self.shown)
        return [*self.shown, *([f"… and {rest} more bad rows"] if rest else [])]


def to_example(row: Mapping[str, Any], scale: Scale, where: str) -> Example:
    """The example in a row with `prompt` and either `response` and `score`, or `chosen` and `rejected`.

    Raises ValueError that says what is wrong with the row.
    """
    prompt = parse_prompt(_present(row, "prompt"))
    is_pair = row.get("chosen") is not None or row.get("rejected") is not None
    if is_pair and row.get("score") is not None:
        raise ValueError("holds a score and a pair: make two rows of it")
    if is_pair:
        chosen, rejected = response_of(row, "chosen"), response_of(row, "rejected")
        if chosen == rejected:
            raise ValueError("chosen and rejected are the same")
        return Preference(prompt=prompt, chosen=chosen, rejected=rejected, where=where)
    response = response_of(row, "response")
    raw = _present(row, "score")
    return Scored(prompt=prompt, response=response, score=scale.to_score(raw), raw=raw, where=where)


def summary(examples: Sequence[Example]) -> dict[str, int]:
    """Return how many of each kind."""
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
