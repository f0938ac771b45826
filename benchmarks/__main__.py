"""`make bench`: prints tables of what this machine does; asserts nothing.

Everything is measured with real processes, one thing after the other. `--only path` runs one part.
`--only actors --actors 1000 --rate 10 --seconds 300` is the crowd for a bigger machine.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import (
    capacity,
    chat,
    console_pages,
    endurance,
    environments,
    experience_path,
    frames,
    goals,
    gpu,
    growth,
    language,
    language_async,
    many_actors,
    offer,
    packing,
    peers,
    people,
    piped,
    prompts_http,
    publication,
    scaling,
    serving,
    startup,
    text,
    training,
    update,
)
from benchmarks.peers import language as language_peers
from benchmarks.peers import served
from benchmarks.table import Options, Table
from penstock.runtime.allocator import keep_freed_memory

PARTS: Final[dict[str, Callable[[Options], Table]]] = {
    "startup": startup.table,
    "train": training.table,
    "exactly-once": piped.table,
    "update": update.table,
    "gpu": gpu.table,
    "path": experience_path.table,
    "path-cpu": experience_path.cpu_table,
    "packing": packing.table,
    "environments": environments.table,
    "frames": frames.table,
    "publish": publication.table,
    "offer": offer.table,
    "actors": many_actors.table,
    "serving": serving.table,
    "growth": growth.table,
    "memory": growth.memory_table,
    "endurance": endurance.table,
    "goals": goals.table,
    "prompts": prompts_http.table,
    "people": people.table,
    "console": console_pages.table,
    "chat": chat.table,
    "language": language.table,
    "language-async": language_async.table,
    "text": text.table,
    "scaling": scaling.table,
    "capacity": capacity.table,
    "peers": peers.table_of(peers.CARTPOLE),
    "peers-acrobot": peers.table_of(peers.ACROBOT),
    "peers-lunar-lander": peers.table_of(peers.LUNAR_LANDER),
    "serving-peers": served.table,
    "language-peers": language_peers.table,
}
ASKED_FOR: Final = (
    "console",
    "endurance",
    "chat",
    "language",
    "language-async",
    "text",
    "scaling",
    "capacity",
    "peers",
    "peers-acrobot",
    "peers-lunar-lander",
    "serving-peers",
    "language-peers",
)
"""Parts that run only when they are named.

Five need the extra rlhf, one a browser, four take long, five have environments of their own (`make
bench-peers`).
"""


def main() -> None:
    """Run the parts asked for; this process is the learner in many of them, and behaves like one."""
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure.")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be repeated)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=2,
        help=(
            "runs of each measurement, whose median is shown (default: %(default)s; 5 for figures to rely on)"
        ),
    )
    parser.add_argument("--actors", type=int, default=200, help="simulated actors at one broker")
    parser.add_argument("--rate", type=float, default=5.0, help="fragments of 64 KiB per second of each")
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        help="how long they send, or how old a run gets in the part endurance",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the part gpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables there as well")
    said = parser.parse_args()
    options = Options(
        repeat=said.repeat, actors=said.actors, rate=said.rate, seconds=said.seconds, device=said.device
    )
    console = Console()
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    tables = {}
    for name in said.only or [part for part in PARTS if part not in ASKED_FOR]:
        began_s = time.monotonic()
        tables[name] = PARTS[name](options)
        tables[name].show(console)
        console.print(f"{name}: measured in {time.monotonic() - began_s:.0f} s\n", highlight=False)
    if said.json is not None:
        said.json.write_text(
            json.dumps({name: table.to_json() for name, table in tables.items()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
