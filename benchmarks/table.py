"""The result of a benchmark: one table to read, and the same figures to keep."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

Cell = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line.

    repeat: runs of each measurement; the median is shown. device: of part gpu.
    """

    repeat: int
    actors: int
    rate: float
    seconds: float
    device: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of results.

    rows: one cell for each column; numbers stay numbers. note: what a reader must know of it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def show(self, console: Console) -> None:
        """Print the table."""
        table = RichTable(*self.columns, title=self.title, title_justify="left", caption=self.note or None)
        for row in self.rows:
            table.add_row(*map(_text, row))
        console.print(table)

    def to_json(self) -> Mapping[str, Any]:
        """Return the table as a JSON object."""
        return asdict(self)


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else cell
