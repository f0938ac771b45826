"""Ways to kill Redis that a random moment seldom meets.

`in_use`      while a broker or the learner waits for its answer.
`in_rewrite`  while a child of it rewrites the append-only file; the child is slowed down to be met.
`power_loss`  with the end of the append-only file gone: what was written in the last second, which
              `fsync_1s` may not have brought to the disk. `kill -9` alone takes nothing from the page cache.
`of_both`     the same, and the learner dies with it: no process remembers what was drawn in that second.
"""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from penstock.launch.run.redis_service import ask
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.kill_log import Kill
from tests.support.fleet.phases import Phase

MEET_S: Final = 5.0
"""How long a place is waited for, before Redis is killed wherever it is."""
IN_USE, IN_REWRITE, POWER_LOSS, OF_BOTH = "in use", "AOF rewrite", "power loss", "power loss of both"


def in_use(fleet: Fleet, _chance: random.Random) -> Kill:
    """Kill it as soon as somebody waits for its answer."""
    met = _meet(fleet, fleet.phase_at_redis)
    return fleet.kill("redis", IN_USE if met else "moment", met)


def in_rewrite(fleet: Fleet, chance: random.Random) -> Kill:
    """Kill it some milliseconds into a rewrite."""
    place = fleet.sockets / "redis.sock"
    ask(place, b"CONFIG SET rdb-key-save-delay 500")
    ask(place, b"BGREWRITEAOF")
    met = _meet(fleet, lambda: _rewriting(place))
    time.sleep(chance.uniform(0.0, 0.1))  # how far the rewrite has got is what is drawn here
    return fleet.kill("redis", IN_REWRITE if met else "moment", met and _rewriting(place))


def power_loss(fleet: Fleet, chance: random.Random, *, of_both: bool = False) -> Kill:
    """Kill it, and cut its file back to where it ended up to a second before."""
    how = OF_BOTH if of_both else POWER_LOSS
    file = _append_only_file(fleet.folder / "redis")
    size, since = file.stat().st_size, time.monotonic()
    span_s = chance.uniform(0.05, 0.9)
    while time.monotonic() - since < span_s:
        fleet.pause()
    kill = fleet.kill("redis", how, _meet(fleet, fleet.phase_at_redis))
    if of_both and fleet.is_alive("learner"):
        fleet.kill("learner", how)
        fleet.start("learner")
    if _append_only_file(fleet.folder / "redis") == file and file.stat().st_size > size:
        os.truncate(file, size)
    return kill


WAYS: Final[dict[str, Callable[[Fleet, random.Random], Kill]]] = {
    "moment": lambda fleet, _chance: fleet.kill("redis"),
    IN_USE: in_use,
    IN_REWRITE: in_rewrite,
    POWER_LOSS: power_loss,
    OF_BOTH: partial(power_loss, of_both=True),
}


def _meet(fleet: Fleet, look: Callable[[], Phase | None]) -> Phase | None:
    """What `look` found in time; asked without a pause, as what is waited for is short."""
    deadline = time.monotonic() + MEET_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        fleet.check()
    return None


def _rewriting(place: Path) -> Phase | None:
    """A phase of Redis's own: it writes its file anew."""
    is_so = b"aof_rewrite_in_progress:1" in ask(place, b"INFO persistence")
    return Phase("aof.rewriting", 0, time.monotonic_ns()) if is_so else None


def _append_only_file(folder: Path) -> Path:
    """The one that is written to: the newest increment, or before Redis 7 the only file."""
    increments = sorted(
        (folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3])
    )
    return increments[-1] if increments else folder / "appendonly.aof"
