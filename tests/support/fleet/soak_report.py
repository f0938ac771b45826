"""What a soak did and found, as JSON and as a table for people."""

import time
from collections import Counter
from typing import Any

from tests.support.fleet.fleet import Audit, Fleet


class Report:
    """Filled while the soak runs; whole at any moment.

    figures: what a scenario measured, by name. failure: what ended it before its time; "" when nothing did.
    """

    def __init__(self, *, scenario: str = "", seed: int = 0, minutes: float = 0.0) -> None:
        self._scenario, self._seed, self._minutes = scenario, seed, minutes
        self._began_s = time.monotonic()
        self._fleet: Fleet | None = None
        self._audits: list[dict[str, Any]] = []
        self._weather: Counter[str] = Counter()
        self.figures: dict[str, Any] = {}
        self.failure = "it did not come to its end"

    def follow(self, fleet: Fleet) -> None:
        """Its kills and restarts are what is reported."""
        self._fleet = fleet

    def note_weather(self, name: str) -> None:
        """The network of a proxy is so from now on."""
        self._weather[name] += 1

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
            "scenario": self._scenario,
            "seed": self._seed,
            "minutes": self._minutes,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "failure": self.failure,
            "passed": not self.failure and bool(self._audits),
            "figures": self.figures,
            **(fleet.log.summary() if fleet else {}),
            "network": dict(self._weather),
            "hung": sum(kill.hung for kill in fleet.log.kills) if fleet else 0,
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
            *(_kills(found) if self._fleet else self.figures.items()),
            ("fragments acknowledged", f"{found['acknowledged']:,}"),
            ("where they went", _each((self._audits[-1]["fragments"] or {}) if self._audits else {})),
            ("audits", f"{sum(one['exit'] == 0 for one in self._audits)} of {len(self._audits)} clean"),
        ]
        lines = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        return "\n".join(lines) + ("\n\n" + self._fleet.log.table() if self._fleet else "")


def _kills(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("kills", f"{found['kills']} ({_each(found['by_role'])})"),
        ("how", _each(found["by_kind"])),
        ("share that hit an idle process", f"{found['share_idle']:.0%}"),
        ("the same of those at random moments", f"{found['share_idle_at_random_moments']:.0%}"),
        ("actors killed while they hung", found["hung"]),
        ("states of the network", _each(found["network"])),
        ("freezes", _each(found["freezes"])),
        ("restarts", _each(found["restarts"])),
    ]


def _each(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
