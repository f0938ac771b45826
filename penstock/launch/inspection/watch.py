"""Observe one run repeatedly, comparing the newest observation with one from some seconds before.

Safe to use from several threads; callers share a look that is younger than `MIN_INTERVAL_S`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.credentials import credentials
from penstock.config.service_settings import calling_security
from penstock.launch.inspection.bottleneck import Verdict, judge
from penstock.launch.inspection.broker import ask
from penstock.launch.inspection.flow import Flow, figures_between, flow_between
from penstock.launch.inspection.observation import Ask, Observation, observe
from penstock.launch.inspection.processes import broker_of, read_endpoints
from penstock.launch.inspection.roles import RoleRow, role_rows
from penstock.rpc.auth import Credentials
from penstock.runtime.exit import Fatal
from penstock.v1 import control_pb2

WINDOW_S: Final = 5.0
"""Seconds over which rates and shares are means."""
MIN_INTERVAL_S: Final = 0.5
_FORGOTTEN_S: Final = 2 * WINDOW_S
"""Seconds of pause after which earlier observations are dropped."""
_DEADLINE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """An observation and its interpretation. Rates in `flow` are None in the first look."""

    now: Observation
    flow: Flow
    verdict: Verdict
    rows: list[RoleRow]

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "bottleneck": asdict(self.verdict),
            "roles": [row.as_json() for row in self.rows],
            "flow": self.flow.as_json(),
        }


class Watch:
    """A run under observation."""

    def __init__(self, run_dir: Path, ask_broker: Ask) -> None:
        self._run_dir, self._ask = run_dir, ask_broker
        self._seen: deque[Observation] = deque()
        self._lock = threading.Lock()

    def look(self) -> RunSnapshot:
        """Return the current look at the run."""
        with self._lock:
            age_s = time.monotonic() - self._seen[-1].at_s if self._seen else math.inf
            if age_s > _FORGOTTEN_S:
                self._seen.clear()
            if age_s >= MIN_INTERVAL_S:
                self._seen.append(observe(self._run_dir, self._ask))
            while len(self._seen) > 2 and self._seen[1].at_s <= self._seen[-1].at_s - WINDOW_S:
                self._seen.popleft()
            before, now = comparable(self._seen), self._seen[-1]
        flow = flow_between(before, now)
        return RunSnapshot(
            now=now, flow=flow, verdict=judge(figures_between(before, now)), rows=role_rows(now, flow)
        )


def comparable(seen: Sequence[Observation]) -> Observation:
    """Return the oldest observation with an answer of every process that answers in the newest.

    Else the oldest.
    """
    answering = _answering(seen[-1])
    whole = (one for one in seen if one is not seen[-1] and answering <= _answering(one))
    return next(whole, seen[0])


def _answering(observation: Observation) -> set[tuple[str, int]]:
    return {(snapshot.name, snapshot.pid) for snapshot in observation.sights if snapshot.samples}


def watch_folder(run_dir: Path, config: Path | None = None, assignments: tuple[str, ...] = ()) -> Watch:
    """Watch the run of a folder, with the credentials that `config` names (default: the run's own).

    assignments: `SECTION.KEY=VALUE` over that configuration.
    """
    security = calling_security(run_dir, config, assignments)
    return Watch(run_dir, lambda: ask_folder(run_dir, credentials(security)))


def ask_folder(run_dir: Path, said: Credentials) -> control_pb2.StatusReply:
    """Return the reply of the broker of a run; raises Fatal when it has none yet or does not answer."""
    address = broker_of(read_endpoints(run_dir))
    if not address:
        raise Fatal("no broker has come up yet")
    return ask(address, said, timeout_s=_DEADLINE_S)
