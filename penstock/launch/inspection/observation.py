"""The visible state of a run at one moment: its processes, its broker's status, the learner's newest lines.

Every source may be silent; its part is then missing, and no source is waited for longer than a second or two.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config.run_files import open_regular
from penstock.config.settings import ConfigurationError
from penstock.launch.inspection.metrics_lines import parse_line
from penstock.launch.inspection.processes import (
    ENDPOINTS_FILE,
    ProcessSnapshot,
    is_alive,
    look,
    look_at_all,
    read_endpoints,
)
from penstock.runtime.exit import Fatal
from penstock.v1 import control_pb2

METRICS_FILE: Final = "metrics.jsonl"
_TAIL_BYTES: Final = 256 * 1024

Ask = Callable[[], control_pb2.StatusReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The newest line of `metrics.jsonl`, and when `updates` last rose in the lines read (Unix time)."""

    row: dict[str, Any]
    update_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The visible state of a run at one moment.

    status: the broker's reply, None with `silence` when it gave none. learnt: None before the first line.
    """

    at_s: float
    wall_s: float
    sights: tuple[ProcessSnapshot, ...]
    status: control_pb2.StatusReply | None
    silence: str = ""
    learnt: Learnt | None = field(default=None, repr=False)

    def of_role(self, *roles: str) -> tuple[ProcessSnapshot, ...]:
        """Return the processes of some roles."""
        return tuple(snapshot for snapshot in self.sights if snapshot.role in roles)


def observe(run_dir: Path, ask: Ask) -> Observation:
    """Return the current state of a run.

    ask: calls the broker's Status; raises Fatal when it does not answer.
    """
    sights = look_at_all(run_dir)
    status, silence = _asked(ask, sights)
    return Observation(
        at_s=time.monotonic(),
        wall_s=time.time(),
        sights=sights,
        status=status,
        silence=silence,
        learnt=read_learnt(run_dir / METRICS_FILE),
    )


def is_going_on(run_dir: Path) -> bool:
    """Return whether any process that the run has announced still lives."""
    alive = {name: one for name, one in read_endpoints(run_dir).items() if is_alive(one.pid)}
    if not alive:
        return False
    announced_at = (run_dir / ENDPOINTS_FILE).stat().st_mtime
    return any(not look(name, one, announced_at).ended for name, one in alive.items())


def read_learnt(path: Path) -> Learnt | None:
    """Return the newest line, from the end of a `metrics.jsonl`; None while it is missing or empty."""
    rows = _last_rows(path)
    if not rows:
        return None
    newest = rows[-1]
    made = [row for row in rows if row.get("updates", 0) == newest.get("updates", 0)]
    return Learnt(row=newest, update_at=made[0].get("time") if newest.get("updates") else None)


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [row for row in map(parse_line, lines) if row is not None]


def _asked(ask: Ask, sights: tuple[ProcessSnapshot, ...]) -> tuple[control_pb2.StatusReply | None, str]:
    """Return the broker's reply.

    A broker that is known to stand still is not called, which would only take time.
    """
    brokers = [snapshot for snapshot in sights if snapshot.role == "broker"]
    if brokers and all(snapshot.problem and not snapshot.samples for snapshot in brokers):
        return None, f"{brokers[0].name} {brokers[0].problem}"
    try:
        return ask(), ""
    except (Fatal, ConfigurationError) as error:
        return None, str(error)
