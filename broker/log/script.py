"""The Lua scripts of the run: read from `broker/log/scripts`, one atomic step each.

A script is its file behind the constants of `broker.log.keys` and the files that its `-- uses:` line
names. Each file's header documents KEYS, ARGV and reply. Every script that writes begins with
`DEL ABSENT`, so that it also works at `maxmemory`.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from broker.log import keys

JUMP: Final = 2**20
"""Least amount by which the allocators advance when a log is opened again.

It ensures that a number drawn in lost seconds is never drawn again.
"""
KEPT_COMMITS: Final = 8
KEPT_SUPERSEDED: Final = 1024
MAX_SESSIONS: Final = 8192
"""Bound on open sessions: scripts that read the run's state walk over all of them."""
KEPT_LOST: Final = 16384
MAX_SHADOW_ENTRIES: Final = 1024
MAX_SHADOW_BYTES: Final = 32 * 2**20
MAX_REPORT_ENTRIES: Final = 4096
MAX_REPORT_BYTES: Final = 8 * 2**20

_LIMITS: Final = (
    "JUMP",
    "KEPT_COMMITS",
    "KEPT_SUPERSEDED",
    "MAX_SESSIONS",
    "KEPT_LOST",
    "MAX_SHADOW_ENTRIES",
    "MAX_SHADOW_BYTES",
    "MAX_REPORT_ENTRIES",
    "MAX_REPORT_BYTES",
)


@dataclass(frozen=True, slots=True)
class Script:
    """The source of a script and the SHA-1 by which Redis knows it."""

    name: str
    source: str
    sha1: str


@cache
def load(name: str) -> Script:
    """Return the script of `broker/log/scripts/NAME.lua`."""
    body = _read(name)
    parts = "\n".join([*(_read(part) for part in _uses(body)), body])
    source = f"{_constants(parts)}\n{parts}"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def names() -> list[str]:
    """Return the names of all scripts, without the shared parts."""
    folder = files("broker.log") / "scripts"
    found = (entry.name.removesuffix(".lua") for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return sorted(name for name in found if not name.startswith("_"))


def _read(name: str) -> str:
    return (files("broker.log") / "scripts" / f"{name}.lua").read_text()


def _uses(body: str) -> list[str]:
    found = re.search(r"^-- uses: (.*)$", body, re.MULTILINE)
    return [f"_{part.strip()}" for part in found[1].split(",")] if found else []


def _constants(source: str) -> str:
    values: dict[str, str | int] = {name: globals()[name] for name in _LIMITS}
    values |= {name: value for name, value in vars(keys).items() if name.isupper()}
    used = (name for name in sorted(values) if re.search(rf"\b{name}\b", source))
    return "\n".join(f"local {name} = {_literal(values[name])}" for name in used)


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else f"'{value}'"
