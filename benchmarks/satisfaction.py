"""The proof that people get what they like: PPO by ratings, beside other ways to use the same ratings.

    python -m benchmarks.satisfaction --seeds 0,1,2      every way, and the table of docs/chat.md

Simulated people rate what a supervised base answers. Each way begins with that base and these ratings, and is
judged on fresh prompts by the exact chance that somebody likes an answer.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.proof_records import DOCS, RESULTS, commit, machine
from benchmarks.satisfaction_stage import optimum, prepare
from benchmarks.satisfaction_ways import BETA, Pleased, every_way, ppo
from workloads.language.quiet import quieten

FILE: Final = RESULTS / "satisfaction.jsonl"
MIXED: Final = "ppo, ratings mixed up"
_MEANING: Final = {
    "supervised": "supervised: conversations alone",
    "thumbs": "thumbs weighted (KTO), no reward model",
    "best of 8": "the best of 8 answers by the reward model",
    "ppo": "PPO by the reward model",
    MIXED: "PPO by a reward model of ratings that stand at other answers",
}
_TABLE: Final = re.compile(r"(?<=<!-- satisfaction -->\n).*?(?=<!-- end of satisfaction -->)", re.DOTALL)


def mixed_up(folder: Path, seed: int, base: Path | None = None) -> Pleased:
    """Return what PPO comes to where ratings say nothing, at other answers. base: see `prepare`."""
    found = ppo(prepare(folder, seed, base=base, is_mixed_up=True))
    return Pleased(**(asdict(found) | {"way": MIXED}))


def record(results: Sequence[Pleased]) -> None:
    """Append a line for each result."""
    with FILE.open("a") as file:
        for one in results:
            file.write(json.dumps(asdict(one) | {"commit": commit(), "machine": machine()}) + "\n")


def recorded() -> list[Pleased]:
    """Return the newest result of every way and seed."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    newest = {(line["way"], line["seed"]): line for line in lines}
    fields = Pleased.__dataclass_fields__
    return [Pleased(**{field: line[field] for field in fields}) for line in newest.values()]


def write_table(results: Sequence[Pleased], page: Path) -> None:
    """Put the table between its marks in a page, best first; leaves a page without marks as it is."""
    best, kl = optimum(BETA)
    lines = ["| | satisfaction | seeds | KL, nats | words | answers per reply |", "|---|---|---|---|---|---|"]
    lines.append(f"| the best policy for this weight of the KL | {best:.3f} | | {kl:.2f} | | 1 |")
    of_way = {way: [one for one in results if one.way == way] for way in _MEANING}
    for way, some in sorted(of_way.items(), key=lambda item: -_mean(item[1], "satisfaction")):
        if some:
            each = ", ".join(f"{one.satisfaction:.3f}" for one in sorted(some, key=lambda one: one.seed))
            count, bound = (8, "at most ") if way == "best of 8" else (1, "")
            lines.append(
                f"| {_MEANING[way]} | {_mean(some, 'satisfaction'):.3f} | {each} | "
                f"{bound}{_mean(some, 'kl'):.2f} | {_mean(some, 'words'):.1f} | {count} |"
            )
    page.write_text(_TABLE.sub("\n".join(["", *lines, "", ""]), page.read_text()))


def _mean(some: Sequence[Pleased], name: str) -> float:
    return fmean(getattr(one, name) for one in some) if some else 0.0


def main() -> None:
    """Train, record and report."""
    parser = argparse.ArgumentParser(description="Let people be pleased, in every way.")
    parser.add_argument("--seeds", default="", help="such as 0,1,2; none: only write the table")
    seeds = map(int, filter(None, parser.parse_args().seeds.split(",")))
    quieten()
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            stage = prepare(Path(folder) / "stage", seed)
            record(every_way(stage))
            record([mixed_up(Path(folder) / "mixed", seed, stage.base)])
    write_table(recorded(), DOCS / "chat.md")


if __name__ == "__main__":
    main()
