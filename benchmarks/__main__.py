"""`make bench`: prints tables of what this machine does; asserts nothing.

Everything is measured with real processes, one thing after the other. `--only path` runs one part.
"""

import argparse
import json
import os
import platform
import time
from importlib import import_module
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.stand import Options, Table
from penstock.runtime.lifecycle import keep_freed_memory

PARTS: Final = {
    "startup": "train:startup_table",
    "train": "train:table",
    "memory": "train:memory_table",
    "exactly-once": "train:exactly_once_table",
    "update": "update:table",
    "gpu": "update:gpu_table",
    "path": "path:table",
    "actors": "actors:table",
    "serving": "serving:table",
    "prompts": "prompts:table",
    "language": "language:table",
    "peers": "peers:cartpole",
    "peers-acrobot": "peers:acrobot",
    "peers-lunar-lander": "peers:lunar_lander",
    "peers-sac": "peers:sac",
    "peers-dqn": "peers:dqn",
    "serving-peers": "serving:peers_table",
    "language-peers": "language:peers_table",
}
"""Function that makes the table, by part."""
NAMED_ONLY: Final = {name for name in PARTS if "peers" in name} | {"language"}
"""Parts that run only where they are named: `make bench-peers` makes their environments; extra `rlhf`."""


def main() -> None:
    keep_freed_memory()  # this process is the learner in many parts
    said = _parse()
    names = ("repeat", "actors", "rate", "seconds", "device")
    options = Options(**{name: getattr(said, name) for name in names})
    console, tables = Console(), dict[str, Table]()
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    for name in said.only or [part for part in PARTS if part not in NAMED_ONLY]:
        module, _, function = PARTS[name].partition(":")
        began_s = time.monotonic()
        tables[name] = getattr(import_module(f"benchmarks.{module}"), function)(options)
        tables[name].show(console)
        console.print(f"{name}: measured in {time.monotonic() - began_s:.0f} s\n", highlight=False)
    if said.json is not None:
        shown = {name: table.to_json() for name, table in tables.items()}
        said.json.write_text(json.dumps(shown, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure.")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be repeated)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=2,
        help="runs of each measurement, whose median is shown (default: %(default)s; 5 for reliable figures)",
    )
    parser.add_argument("--actors", type=int, default=200, help="of the part actors: simulated actors")
    parser.add_argument("--rate", type=float, default=5.0, help="fragments of 64 KiB per second of each")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long they send")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the part gpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables there as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
