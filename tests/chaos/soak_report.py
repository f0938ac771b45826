"""What a soak did and found, as JSON and as a table for people."""

import time
from typing import Any

from tests.chaos.fleet import Audit, Fleet


class Report:
    """Filled while the soak runs; whole at any moment. failure: what ended it before its time."""

    def __init__(self, *, seed: int, minutes: float) -> None:
        self._seed, self._minutes = seed, minutes
        self._began_s = time.monotonic()
        self._fleet: Fleet | None = None
        self._audits: list[dict[str, Any]] = []
        self.failure = ""

    def follow(self, fleet: Fleet) -> None:
        """Its kills and restarts are what is reported."""
        self._fleet = fleet

    def audit(self, when: str, audit: Audit) -> None:
        """One more; AssertionError when its books do not balance."""
        found = {key: audit.report.get(key) for key in ("clean", "fragments", "journalled", "counters")}
        self._audits.append({"when": when, "exit": audit.code, **found})
        assert audit.code == 0, f"audit {when}: {audit.text}"

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        fleet = self._fleet
        last = self._audits[-1] if self._audits else {}
        return {
            "seed": self._seed,
            "minutes": self._minutes,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "failure": self.failure,
            "passed": not self.failure and bool(self._audits),
            **(fleet.log.summary() if fleet else {}),
            "freezes": dict(fleet.log.freezes) if fleet else {},
            "restarts": fleet.restarts() if fleet else {},
            "acknowledged": (last.get("counters") or {}).get("acked", 0),
            "audits": self._audits,
            "log": fleet.log.lines() if fleet else [],
        }

    def table(self) -> str:
        """Markdown."""
        found = self.to_json()
        rows = [
            ("seed", found["seed"]),
            ("seconds", found["seconds"]),
            ("result", f"failed: {self.failure.splitlines()[0]}" if self.failure else "every audit balances"),
            ("kills", f"{found.get('kills', 0)} ({_each(found.get('by_role', {}))})"),
            ("how", _each(found.get("by_kind", {}))),
            ("share that hit an idle process", f"{found.get('share_idle', 0):.0%}"),
            (
                "the same of those at random moments",
                f"{found.get('share_idle_at_random_moments', 0):.0%}",
            ),
            ("freezes", _each(found["freezes"])),
            ("restarts", _each(found["restarts"])),
            ("fragments acknowledged", f"{found['acknowledged']:,}"),
            ("where they went", _each((self._audits[-1]["fragments"] or {}) if self._audits else {})),
            ("audits", f"{sum(one['exit'] == 0 for one in self._audits)} of {len(self._audits)} clean"),
        ]
        lines = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        return "\n".join(lines) + ("\n\n" + self._fleet.log.table() if self._fleet else "")


def _each(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
