"""The Lua scripts of the run: read from `broker/log/scripts`, one atomic step each.

A script is its file behind those that its `-- uses:` line names and what those need. Each file's header
documents KEYS, ARGV and reply, which comes in an envelope (`penstock.broker.log.replies`). Every script that
writes begins with `DEL ABSENT`, so that it also works at `maxmemory`.

Redis makes every function of a script anew for each call, and binds to it what it names of the lines above.
That took a quarter of a call's time, so constants are put in as literals, and functions that nothing calls
are left out.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from penstock.broker.log import keys
from penstock.protocol import limits

# ---- What an entry of the log takes of Redis's memory: what `broker.max_log_bytes` bounds.

ENTRY_OVERHEAD_BYTES: Final = 256
_LEAST_STEP: Final = 16


def entry_bytes(payload: int, header: int) -> int:
    """Return the bytes of an entry whose payload and encoded header have so many."""
    step = max(_LEAST_STEP, (1 << (payload + 15).bit_length()) // 8)
    return -(-(payload + 16) // step) * step + math.ceil(header * 1.25) + ENTRY_OVERHEAD_BYTES


FIRST_LAYOUT: Final = 1
"""Layout of a run whose state does not name one."""
LAYOUT: Final = 2
"""2: `log_bytes` counts what entries take in Redis, before it counted payloads.

Rises with every change after which scripts of before and after must not meet the same keys."""
READ_EARLIER_LAYOUTS: Final = ("greet", "acquire", "open_log")
"""Scripts with which a learner takes over a run of an earlier layout; `open_log` brings it up to date."""
JUMP: Final = 2**20
"""Least amount by which the allocators advance when a log is opened again.

It ensures that a number drawn in lost seconds is never drawn again.
"""
KEPT_COMMITS: Final = 8
KEPT_SUPERSEDED: Final = 1024
MOST_DAMAGED: Final = 3
"""Sessions in a row that an actor may lose by experience that cannot be learned from."""
FORGIVEN_AFTER: Final = 256
"""A session that had so many fragments acknowledged before is the first of its row."""
MAX_SESSIONS: Final = 8192
"""Bound on open sessions: scripts that read the run's state walk over all of them."""
KEPT_LOST: Final = 16384
MAX_SHADOW_ENTRIES: Final = 1024
MAX_SHADOW_BYTES: Final = 32 * 2**20
WEIGHT_CHUNK_BYTES: Final = limits.WEIGHT_CHUNK_BYTES
MOST_FETCHED: Final = 4
"""Versions of more than a chunk that may be fetched at once.

Sessions on one kind of line hold two at most: they begin the newest or join it. So two kinds need not know of
one another, and of more than two only the slowest is sure to keep what it fetches.
"""
KEPT_COMMANDS: Final = 64
MAX_PENDING_COMMANDS: Final = 16
MOST_STEP_MS: Final = 2_000
"""Largest advance of the run's time from one script to the next: a step of the clock does not count."""
CLOCK_NOTE_MS: Final = 100
"""Least time between two writes of the run's time."""
PATIENCE: Final = 4
"""Credit comes back from a session that appends nothing for so many times its median fragment time."""
LEAST_PATIENCE_MS: Final = 1000
"""Never sooner than this: a pause of a process or of the network is no silence."""
MOST_TURNS: Final = 16
"""Turns by which a session may be ahead of the others or behind them."""
SERVER_WAIT_MS: Final = 5000
"""So long a fragment's room is kept for a policy server that was refused; it asks again more often."""
MOST_RECLAIMED: Final = 64
"""Sessions whose credit one script takes back."""
MAX_REPORT_ENTRIES: Final = 4096
MAX_REPORT_BYTES: Final = 8 * 2**20

_TOKEN: Final = re.compile(r"'[^'\n]*'|--[^\n]*|\b[A-Z][A-Z_0-9]*\b")
"""A string, a comment, or a word that may be a constant."""
_STRING: Final = re.compile(r"'[^'\n]*'")
_CALL: Final = re.compile(r"(?<![.\w])(\w+)\(")
"""No script uses a shared function in another way."""
_FUNCTION: Final = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
_REDIS_CALL: Final = re.compile(r"redis\.call\(\s*'([A-Z]+)'")


@dataclass(frozen=True, slots=True)
class Script:
    """A source and the SHA-1 by which Redis knows it."""

    name: str
    source: str
    sha1: str


@cache
def load(name: str) -> Script:
    """Return the script of `broker/log/scripts/NAME.lua`."""
    own = read_source(name)
    shared = dict.fromkeys([*_parts(read_source("_envelope")), "_envelope", *_parts(own)])
    constants = _constants() | {"READS_EARLIER": int(name in READ_EARLIER_LAYOUTS)}
    parts = _with_literals("\n".join(map(read_source, shared)), constants)
    body = _with_literals(own, constants)
    body = f"local function script()\n{body}\nend\nreturn answer_in_envelope(script)\n"
    source = f"{_called(parts, body)}\n{body}"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def names() -> list[str]:
    folder = files("penstock.broker.log") / "scripts"
    found = (entry.name.removesuffix(".lua") for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return sorted(name for name in found if not name.startswith("_"))


@cache
def commands() -> tuple[str, ...]:
    """Return the commands of Redis that the scripts call, sorted."""
    return tuple(sorted({name for one in names() for name in _REDIS_CALL.findall(load(one).source)}))


def read_source(name: str) -> str:
    """Return the text of one file of `broker/log/scripts`; tests replace the clock here."""
    return (files("penstock.broker.log") / "scripts" / f"{name}.lua").read_text()


def _parts(body: str) -> list[str]:
    """Return the shared parts that a file uses, each behind those that it needs itself."""
    found = re.search(r"^-- (?:uses: (.*)|Needs: (.*)\.)$", body, re.MULTILINE)
    named = [f"_{part.strip()}" for part in (found[1] or found[2]).split(",")] if found else []
    return list(dict.fromkeys(needed for part in named for needed in (*_parts(read_source(part)), part)))


def _constants() -> dict[str, str | int]:
    """Return the numbers above and the keys, by name."""
    named = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
    return named | {name: value for name, value in vars(keys).items() if name.isupper()}


def _with_literals(source: str, constants: Mapping[str, str | int]) -> str:
    """Return the source without comments, and with its constants' values in place of their names."""

    def replaced(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith("--"):
            return ""
        value = constants.get(word)
        return word if value is None else str(value) if isinstance(value, int) else f"'{value}'"

    return _TOKEN.sub(replaced, source)


def _called(parts: str, body: str) -> str:
    """Return the parts without functions that the body calls neither directly nor through others."""
    functions = {found[1]: found[0] for found in _FUNCTION.finditer(parts)}
    waiting, called = [_FUNCTION.sub("", parts) + body], set[str]()
    while waiting:
        found = functions.keys() & set(_CALL.findall(_STRING.sub("''", waiting.pop()))) - called
        waiting += [functions[name] for name in found]
        called |= found
    return _FUNCTION.sub(lambda found: found[0] if found[1] in called else "", parts)
