"""What is rated: each thing has a head of the network, and a scale that its ratings are on.

relevance=stars   thumb=thumbs   charm=0:10      NAME=SCALE, as `penstock.workloads.language.feedback.scale`
has them

Beside them every network has one more head, which learns which of two responses is better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.scale import Scale, parse_scale

PREFERRED: Final = "preferred"
"""The name of the head that compares."""
MAX_HEADS: Final = 32


@dataclass(frozen=True, slots=True)
class Head:
    """Something that is rated. name: as the `key` of rows."""

    name: str
    scale: Scale

    @property
    def is_choice(self) -> bool:
        """Whether a rating says yes or no."""
        return self.scale.name == "thumbs"

    def share(self, raw: Any) -> float:
        """Return a rating of its scale as 0 to 1; raises ValueError that says why it is none."""
        return (self.scale.to_score(raw) + 1) / 2


def parse_heads(texts: Sequence[str]) -> tuple[Head, ...]:
    """Return the heads that `NAME=SCALE` texts declare.

    Raises ConfigurationError that names the text: a name twice, no scale, or one without bounds.
    """
    heads = tuple(map(_parse, texts))
    names = [one.name for one in heads]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"head {name!r}: is declared twice")
    if not 1 <= len(heads) <= MAX_HEADS:
        raise ConfigurationError(f"{len(heads)} heads: declare 1 to {MAX_HEADS}, as NAME=SCALE")
    return heads


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Return the weights of heads in the reward that `NAME=NUMBER` texts declare; the last of a name counts.

    Raises ConfigurationError that names the text for one of another form, or a number below 0 or without end.
    """
    return dict(map(_parse_weight, texts))


def reward_weights(heads: Sequence[Head], said: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each head in the reward: what was said, else 1, and 0 for that of pairs.

    Raises ConfigurationError for a weight of no head, below 0, without end, or all 0.
    """
    weights = {**{one.name: 1.0 for one in heads}, PREFERRED: 0.0}
    for name, value in (said or {}).items():
        if name not in weights:
            raise ConfigurationError(
                f"weight {name}={value:g}: there is no such head; use {', '.join(weights)}"
            )
        if not 0 <= value < float("inf"):
            raise ConfigurationError(f"weight {name}={value:g}: must be 0 or more, and finite")
        weights[name] = float(value)
    total = sum(weights.values())
    if not total:
        raise ConfigurationError("all weights are 0: give at least one head a weight above 0")
    if total == float("inf"):
        raise ConfigurationError("the weights have no finite sum: make them smaller, for their ratio counts")
    return weights


def _parse_weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        weight = float(number)
    except ValueError as error:
        raise ConfigurationError(f"--weight {text!r}: write NAME=NUMBER, such as relevance=2") from error
    if not 0 <= weight < float("inf"):
        raise ConfigurationError(f"--weight {text!r}: must be 0 or more, and finite")
    return name, weight


def _parse(text: str) -> Head:
    name, _, scale = text.partition("=")
    if not name or not scale or name == PREFERRED:
        raise ConfigurationError(
            f"head {text!r}: write NAME=SCALE, such as relevance=stars; {PREFERRED!r} is the head of pairs"
        )
    try:
        found = parse_scale(scale)
    except ValueError as error:
        raise ConfigurationError(f"head {text!r}: {error}") from error
    if found.name == "none":
        raise ConfigurationError(f"head {text!r}: a head gives 0 to 1, so its scale has bounds; use LOW:HIGH")
    return Head(name, found)
