"""Where each kill found its victim, counted by role and phase.

A kill that hits a process with nothing in hand tests little: a campaign in which more than half did is no
campaign, and `check_busy` fails it.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Final

MOST_IDLE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """how: "fail point" (it killed itself at the phase), "moment" (random) or what else was done to it.

    phase, sequence: the last place that a working thread had reached, and what it worked on. hung: actors of
    the process that ended no fragment any more.
    """

    at_s: float
    name: str
    how: str
    phase: str
    sequence: int
    idle: bool
    hung: int = 0

    @property
    def role(self) -> str:
        """Such as broker, of broker-0."""
        return self.name.partition("-")[0]


class KillLog:
    """The kills of one campaign, in order."""

    def __init__(self) -> None:
        self.kills: list[Kill] = []
        self.freezes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.kills)

    def add(self, kill: Kill) -> None:
        """One more."""
        self.kills.append(kill)

    def idle_share(self, how: str | None = None) -> float:
        """Of all kills, or of those of one kind."""
        chosen = [kill for kill in self.kills if how in (None, kill.how)]
        return sum(kill.idle for kill in chosen) / len(chosen) if chosen else 0.0

    def check_busy(self) -> None:
        """AssertionError when more than half of the kills hit an idle process."""
        share = self.idle_share()
        assert share <= MOST_IDLE, f"{share:.0%} of the kills hit an idle process:\n{self.table()}"

    def by_phase(self) -> dict[str, dict[str, int]]:
        """Role, phase, number of kills; the most frequent first."""
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        for kill in self.kills:
            counted[kill.role][kill.phase] += 1
        return {role: dict(counted[role].most_common()) for role in sorted(counted)}

    def summary(self) -> dict[str, Any]:
        """What a report says of the kills."""
        return {
            "kills": len(self.kills),
            "by_role": dict(Counter(kill.role for kill in self.kills).most_common()),
            "by_kind": dict(Counter(kill.how for kill in self.kills).most_common()),
            "by_phase": self.by_phase(),
            "share_idle": round(self.idle_share(), 3),
            "share_idle_at_random_moments": round(self.idle_share("moment"), 3),
        }

    def lines(self) -> list[dict[str, Any]]:
        """Every kill."""
        return [asdict(kill) | {"at_s": round(kill.at_s, 3)} for kill in self.kills]

    def table(self) -> str:
        """Markdown: role, phase, kills."""
        rows = [
            f"| {role} | {phase} | {count} |"
            for role, phases in self.by_phase().items()
            for phase, count in phases.items()
        ]
        return "\n".join(("| role | phase at death | kills |", "|---|---|---|", *rows))
