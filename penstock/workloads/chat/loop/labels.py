"""What people have said of a run's answers that counts, and how much of it is new."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from penstock.registry.ratings import KeptRating
from penstock.registry.registry import Registry
from penstock.registry.weight_files import replace_file
from penstock.workloads.chat.ratings.rating_filter import Row, filter_ratings
from penstock.workloads.chat.ratings.rating_rules import RatingRules
from penstock.workloads.language.feedback.feedback_places import rating_row, rows_of
from penstock.workloads.language.prompt import identity, parse_prompt

_PAGE: Final = 1000


class NewRatings:
    """Counts the ratings of a policy behind a number, and reads each of them once."""

    def __init__(self, policy: str, after: int) -> None:
        self._policy = policy
        self.count, self.newest = 0, after

    def look(self, registry: Registry) -> int:
        """Return how many there are by now; `newest` is then the number of the newest."""
        while page := registry.ratings(self._policy, self.newest, _PAGE):
            self.count, self.newest = self.count + len(page), page[-1].number
        return self.count


def believed(registry: Registry, policy: str, rules: RatingRules, through: int) -> list[Row]:
    """Return the rows that count among the ratings up to a number, each with its `number`."""
    rows = [rating_row(one) for one in _through(registry, policy, through)]
    return filter_ratings(rows, rules).kept


def new_among(rows: Iterable[Row], after: int) -> int:
    """Return how many rows that `believed` returned are behind a number."""
    return sum(row["number"] > after for row in rows)


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines, whole and on the disk when this returns; raises OSError."""
    replace_file(file, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def replayed_prompts(rows: Iterable[Row], prompts: str) -> list[dict[str, Any]]:
    """Return the prompts of a training, each once: what people had said before the answers that they rated.

    Behind them come those of the run, so that what the model could do before stays in its training.

    prompts: where the run has them. Raises ConfigurationError for a place that cannot be read.
    """
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(_name(row), row["prompt"])
    for _, row in rows_of(prompts) if prompts else ():
        if not isinstance(row, ValueError) and row.get("prompt") is not None:
            found.setdefault(_name(row), row["prompt"])
    return [{"prompt": prompt} for prompt in found.values()]


def _through(registry: Registry, policy: str, through: int) -> Iterable[KeptRating]:
    after = 0
    while page := registry.ratings(policy, after, _PAGE):
        after = page[-1].number
        yield from (one for one in page if one.number <= through)


def _name(row: Row) -> str:
    try:
        return identity(parse_prompt(row["prompt"]))
    except ValueError:
        return repr(row["prompt"])  # the training says what is wrong with it
