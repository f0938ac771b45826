"""Crowds of 1, 10, 100 and 1,000 simulated actors, some of them slow or hung, as a table and a picture.

    python -m benchmarks.crowd_table [--records FILE.jsonl] [--picture FILE.png]

Each cell is a crowd of `benchmarks.credit_stand`: the real scripts of a real Redis, in virtual time, so the
machine's speed changes nothing. Cells that the file of records has are not played again.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import redis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.credit_stand import Stand
from benchmarks.crowd import Crowd, Outcome
from benchmarks.services import services
from benchmarks.virtual_time import virtual_time

ACTORS: Final = (1, 10, 100, 1000)
KINDS: Final = (
    ("normal", 0.0),
    ("slow", 0.01),
    ("slow", 0.1),
    ("slow", 0.5),
    ("hung", 0.01),
    ("hung", 0.1),
    ("hung", 0.5),
)
HALF_MS: Final = 20_000
"""A crowd acts for two of these; shares are counted in the second one."""

LEAST_SHARE: Final = 0.95
"""Of the others' work; the arrivals of fragments are random, which is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What became of one crowd.

    kind: of those that are not as the others; part: their part of the actors. first_update: in mean fragment
    times. rounds: of the budget, until each actor that is neither slow nor hung had appended; bound: that
    which is promised. share: fragments of those actors beside what the same actors did in a crowd without
    others. outstanding: the most at once, beside the budget.
    """

    actors: int
    kind: str
    part: float
    weights_first: bool
    first_update: float
    rounds: int
    bound: int
    share: float
    outstanding: float


def crowd(actors: int, kind: str, part: float, *, weights_first: bool) -> Crowd | None:
    """Return the crowd of a cell; None where no actor would be slow or hung, or every one."""
    others = round(actors * part)
    if part and not 0 < others < actors:
        return None
    budget = max(2, actors // 2)
    return Crowd(
        actors=actors,
        budget=budget,
        batch=max(1, budget // 2),
        slow=others * (kind == "slow"),
        hung=others * (kind == "hung"),
        weights_first=weights_first,
    )


def play(url: str, which: Crowd) -> Outcome:
    """Let a crowd act on an emptied server."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
        stand = Stand(client, url, which)
        outcome = stand.run(2 * HALF_MS)
        stand.close()
    return outcome


def cells(url: str, known: Iterable[Cell]) -> Iterator[Cell]:
    """Play what is not known yet."""
    done = {(cell.actors, cell.kind, cell.part, cell.weights_first) for cell in known}
    for actors in ACTORS:
        usual: Outcome | None = None
        for kind, part in KINDS:
            for weights_first in (True, False):
                which = crowd(actors, kind, part, weights_first=weights_first)
                if which is None or (actors, kind, part, weights_first) in done:
                    continue
                if usual is None:
                    plain = crowd(actors, "normal", 0.0, weights_first=True)
                    assert plain is not None
                    usual = play(url, plain)
                outcome = usual if which == usual.crowd else play(url, which)
                yield judge(which, outcome, usual, kind, part)


def judge(which: Crowd, outcome: Outcome, usual: Outcome, kind: str, part: float) -> Cell:
    """Return the figures of a crowd beside one without slow or hung actors."""
    span = (HALF_MS, 2 * HALF_MS)
    return Cell(
        actors=which.actors,
        kind=kind,
        part=part,
        weights_first=which.weights_first,
        first_update=round(outcome.updates[0] / which.fragment_ms, 2),
        rounds=int(outcome.rounds_until_all(which.rest)),
        bound=math.ceil(which.actors / which.budget) + 1,
        share=round(outcome.count(which.rest, *span) / usual.count(which.rest, *span), 3),
        outstanding=round(outcome.most_outstanding / which.budget, 3),
    )


def draw(found: Iterable[Cell], path: Path) -> None:
    """Draw a row per kind of actor, a column per number of actors; the colour is the share of the rest."""
    by_place = {(cell.kind, cell.part, cell.actors): cell for cell in found if cell.weights_first}
    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    for row, (kind, part) in enumerate(KINDS):
        for column, actors in enumerate(ACTORS):
            cell = by_place.get((kind, part, actors))
            colour = "0.93" if cell is None else "#b7e1cd" if cell.share >= LEAST_SHARE else "#f4c7c3"
            axis.add_patch(_tile(column, row, colour))
            axis.text(column, row, _words(cell), ha="center", va="center", fontsize=9)
    axis.set_xticks(range(len(ACTORS)), [f"{actors:,}" for actors in ACTORS])
    axis.set_yticks(range(len(KINDS)), [f"{part:.0%} {kind}" if part else kind for kind, part in KINDS])
    axis.set(xlabel="actors", xlim=(-0.5, len(ACTORS) - 0.5), ylim=(len(KINDS) - 0.5, -0.5))
    axis.tick_params(length=0)
    axis.set_title("Work of the other actors, beside a crowd in which all are like them")
    figure.savefig(path, dpi=110)


def _tile(column: int, row: int, colour: str) -> Rectangle:
    return Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, color=colour)


def _words(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return (
        f"{cell.share:.0%}\nall in round {cell.rounds} (bound {cell.bound})\n"
        f"first update after {cell.first_update:.1f}"
    )


def read(path: Path) -> list[Cell]:
    """Return the cells of a file of records."""
    return [Cell(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Play what is missing, one line of the file each, and draw all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd_table", description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("benchmarks/results/crowds.jsonl"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/crowds.png"))
    given = parser.parse_args()
    with services(durability="memory", broker=False) as here, virtual_time(), given.records.open("a") as file:
        for cell in cells(here.redis_url, read(given.records)):
            file.write(json.dumps(asdict(cell)) + "\n")
            file.flush()
            print(cell)
    draw(read(given.records), given.picture)


if __name__ == "__main__":
    main()
