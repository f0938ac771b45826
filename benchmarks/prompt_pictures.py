"""The table and the picture of the proof of prompts."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from matplotlib.figure import Figure

_MEANING: Final = {
    "hashing": "the recipe, hashing embedding",
    "table": "best sequence for each category, which it is told",
    "greedy": "best next step each time, knowing the reward exactly",
    "LinUCB": "a linear bandit on the embedding",
    "fixed": "best fixed sequence for all prompts",
    "blind": "the recipe, paid without regard to the category",
    "permuted": "the recipe, embeddings of other texts",
    "minilm": "the recipe, embeddings of MiniLM",
}
_TABLE: Final = re.compile(r"(?<=<!-- scores -->\n).*?(?=<!-- end of scores -->)", re.DOTALL)


class Score(Protocol):
    """A result, as `benchmarks.prompts.Judged`."""

    @property
    def name(self) -> str:
        """Who earned it."""
        ...

    @property
    def score(self) -> float:
        """Return 0 for random mutations, 1 for the optimum."""
        ...

    @property
    def error(self) -> float:
        """Return its standard error over the prompts."""
        ...


def write_table(results: Sequence[Score], page: Path) -> None:
    """Put the table between its marks in a page, best first; leaves a page without marks as it is."""
    by_name = _by_name(results)
    lines = ["| | score | seeds | standard error |", "|---|---|---|---|"]
    lines.append("| exact optimum | 1 | | |")
    for name, some in sorted(by_name.items(), key=lambda item: -_mean(item[1])):
        single = ", ".join(f"{one.score:.3f}" for one in some) if len(some) > 1 else ""
        mean, error = _mean(some), _error(some)
        lines.append(f"| {_MEANING[name]} | {mean:.3f} | {single} | {error:.3f} |")
    lines.append("| random mutations | 0 | | |")
    page.write_text(_TABLE.sub("\n".join(["", *lines, "", ""]), page.read_text()))


def draw(results: Sequence[Score], path: Path) -> None:
    """Draw the scores as bars with two standard errors."""
    by_name = dict(sorted(_by_name(results).items(), key=lambda item: _mean(item[1])))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axis = figure.subplots()
    means, errors = (
        [_mean(some) for some in by_name.values()],
        [2 * _error(some) for some in by_name.values()],
    )
    axis.barh(list(by_name), means, xerr=errors, color="0.6", ecolor="0.2", capsize=3)
    axis.axvline(1.0, color="0.2", linestyle=":")
    axis.axvline(0.8, color="0.2", linewidth=0.8)
    axis.set_xlabel("0: random mutations; 1: exact optimum; line: 0.8, bars: two standard errors")
    figure.savefig(path, dpi=80)


def _by_name(results: Sequence[Score]) -> dict[str, list[Score]]:
    by_name: dict[str, list[Score]] = defaultdict(list)
    for one in results:
        by_name[one.name].append(one)
    return by_name


def _mean(some: Sequence[Score]) -> float:
    return float(np.mean([one.score for one in some]))


def _error(some: Sequence[Score]) -> float:
    """Return that over the prompts, and over the seeds where there are several."""
    scores = [one.score for one in some]
    over_seeds = float(np.std(scores, ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else 0.0
    return float(np.hypot(np.mean([one.error for one in some]), over_seeds))
