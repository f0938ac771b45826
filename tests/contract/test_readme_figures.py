"""What the README says about speed is what docs/performance.md says, and it says what is missed."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
NUMBER: Final = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])")
"""Not the digits of a name, such as Stable-Baselines3."""
WORDS: Final = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True)
class Figure:
    """The `index`-th number in a column of the row of docs/performance.md whose first cell begins so."""

    row: str
    column: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure divided by another."""

    of: Figure
    to: Figure


SHELL: Final = "CartPole-v1, seconds from the shell until 475"
TRAINING: Final = "CartPole-v1, training seconds until 475"
STEPS: Final = "CartPole-v1, steps/s"
LARGE: Final = "large fragments, actor to learner"
PATH: Final = "path, 64 KiB / 512 KiB / 2 MiB"
ACTIONS: Final = "actions, 64 calls in flight"
SOURCES: Final[dict[str, tuple[Figure | Ratio, ...]]] = {
    "CartPole-v1 from the shell": (
        Figure(SHELL, 1), Figure(TRAINING, 1), Figure(SHELL, 2), Figure(TRAINING, 2),
        Figure(SHELL, 2, 1), Figure(TRAINING, 2, 1),
    ),
    "CartPole-v1, steps per second": (Figure(STEPS, 1), Figure(STEPS, 2), Figure(STEPS, 2, 2)),
    "experience from actor to learner": (
        Figure(LARGE, 1), Figure(LARGE, 1, 2),
        Ratio(Figure(LARGE, 1), Figure(PATH, 3)), Ratio(Figure(LARGE, 1, 2), Figure(PATH, 3, 2)),
    ),
    "actions from a policy server": (
        Figure(ACTIONS, 1), Figure("actions, one client alone", 1), Figure(ACTIONS, 2),
    ),
}  # fmt: skip
"""Where the numbers of each row of the README come from, in the order in which they stand there."""


def _section(page: str, heading: str) -> str:
    """The text below a heading of the second level."""
    text = (ROOT / page).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _rows(text: str) -> list[list[str]]:
    """The cells of every row of every table."""
    lines = re.findall(r"^\|(.+)\|$", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def _numbers(text: str) -> list[tuple[float, float]]:
    """Each number with the unit of its last digit that is not a trailing zero of a whole number."""
    found = []
    for match in NUMBER.findall(text):
        digits = match.replace(",", "")
        zeros = len(digits) - len(digits.rstrip("0")) if "." not in digits else 0
        unit = 10.0**zeros if "." not in digits else 10.0 ** -len(digits.partition(".")[2])
        found.append((float(digits), unit))
    return found


def _value(source: Figure | Ratio) -> float:
    if isinstance(source, Ratio):
        return _value(source.of) / _value(source.to)
    rows = _rows((ROOT / "docs" / "performance.md").read_text())
    (row,) = [row for row in rows if row[0].startswith(source.row)]
    return _numbers(row[source.column])[source.index][0]


def _rows_of_the_readme() -> dict[str, str]:
    """Everything behind the first cell of each row, by the first cell."""
    _, _, *rows = _rows(_section("README.md", "How fast"))
    return {row[0]: " ".join(row[1:]) for row in rows}


def test_every_row_has_its_source() -> None:
    rows = _rows_of_the_readme()
    assert [row for row in rows if not any(row.startswith(known) for known in SOURCES)] == []
    assert len(rows) == len(SOURCES)


@pytest.mark.parametrize("row", SOURCES)
def test_a_figure_is_the_one_of_the_page(row: str) -> None:
    (text,) = [text for name, text in _rows_of_the_readme().items() if name.startswith(row)]
    told = _numbers(text)
    expected = [_value(source) for source in SOURCES[row]]
    assert len(told) == len(expected)
    wrong = [
        (number, value)
        for (number, unit), value in zip(told, expected, strict=True)
        if abs(number - value) > unit / 2
    ]
    assert wrong == []


def test_the_readme_says_which_aims_are_missed() -> None:
    text = " ".join(_section("README.md", "How fast").split())
    bars = {row[0]: row for row in _rows(_section("docs/performance.md", "Bars"))}
    steps = bars["steps/s of CartPole-v1"]
    assert f"{float(steps[3]):.1f} times the steps per second of the fastest other" in text
    assert f"instead of {steps[2]} times" in text
    verdicts = ", ".join((bars[PATH][4], bars["the same with the append-only file"][4])).split(", ")
    missed = sum(verdict.startswith("missed") for verdict in verdicts)
    assert f"{WORDS[missed]} of the {WORDS[len(verdicts)]} aims for the way from actor to learner" in text
