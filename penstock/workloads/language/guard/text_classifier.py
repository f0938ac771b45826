"""A small classifier of texts: hashed words and letters, one weight each, and a line between two sides.

Features are the words of a folded text, pairs of them that follow one another, and runs of 3 to 5 letters,
each counted at one of WIDTH places; the counts have length 1. The weights have the least cross-entropy with a
quadratic penalty, found by steps of fixed size: two trainings on the same rows are equal.
"""

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.guard.guard_rules import fold

Array = NDArray[np.float64]

WIDTH: Final = 8192
_STEPS: Final = 300
_SIZE: Final = 4.0
_PENALTY: Final = 1e-3
_FORM: Final = "penstock-guard-1"


@dataclass(frozen=True, slots=True, eq=False)
class TextClassifier:
    """Weights [WIDTH] and a shift; a text whose chance is at `threshold` or above does not pass."""

    weights: Array
    shift: float
    threshold: float = 0.5

    def chance(self, text: str) -> float:
        """Return how likely it is that a text is of those that should not pass, 0 to 1."""
        return float(1 / (1 + np.exp(-(features(text) @ self.weights + self.shift))))

    def save(self, file: Path) -> None:
        """Write it as JSON; raises OSError."""
        text = {
            "form": _FORM,
            "threshold": self.threshold,
            "shift": self.shift,
            "weights": [round(float(one), 6) for one in self.weights],
        }
        file.write_text(json.dumps(text) + "\n")


def load_classifier(file: Path, named: str) -> TextClassifier:
    """Return a classifier that was saved; raises ConfigurationError for a file that holds none.

    named: the option or the setting that names the file.
    """
    where = f"{named}={str(file)!r}: holds no classifier of a guard"
    try:
        text = json.loads(file.read_text())
        weights = np.array(text["weights"], np.float64)
        found = TextClassifier(weights, float(text["shift"]), float(text["threshold"]))
        is_whole = text["form"] == _FORM and weights.shape == (WIDTH,)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{where}: {error}") from error
    if not is_whole or not np.isfinite([*weights, found.shift]).all() or not 0 < found.threshold < 1:
        raise ConfigurationError(f"{where}: train it again")
    return found


def train_classifier(
    texts: Sequence[str], blocked: Sequence[bool], *, threshold: float = 0.5
) -> TextClassifier:
    """Return the classifier of texts of which some should not pass; raises ValueError where one side is none.

    Both sides weigh the same, however many texts each has.
    """
    said = np.array(blocked, np.float64)
    if not len(said) or said.all() or not said.any():
        raise ValueError("give texts that should pass and others that should not")
    x = np.array([features(text) for text in texts])
    each = np.where(said > 0, 0.5 / said.sum(), 0.5 / (1 - said).sum())
    weights, shift = np.zeros(WIDTH), 0.0
    for _ in range(_STEPS):
        error = each * (1 / (1 + np.exp(-(x @ weights + shift))) - said)
        weights -= _SIZE * (x.T @ error + _PENALTY * weights)
        shift -= _SIZE * float(error.sum())
    return TextClassifier(weights, shift, threshold)


def features(text: str) -> Array:
    """Return the features of a text, [WIDTH], of length 1, or all 0 for one without letters."""
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
