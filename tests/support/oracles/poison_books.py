"""What the learner's books must say of a poisoned run, held against what the poisoners wrote down."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from penstock.launch.audit.books import Lineage, read_lineage
from penstock.learner.checkpoint.store import CheckpointStore
from tests.support.abuse.poisoner import Poison, Way

FOUND_OUT: Final = ("invalid", "nan")
"""How a fragment is booked that was recognised."""
NOT_LOOKED_AT: Final = ("stale", "quarantined", "log_lost", "restored")
"""How one is booked that is dropped before its payload is."""
KEPT: Final = 3

Key = tuple[int, int]


class PoisonBooks:
    """The lineage of a run's newest checkpoint, by fragment."""

    def __init__(self, run_dir: Path) -> None:
        self.booked: dict[Key, str] = {}
        for line in _newest(run_dir).lines:
            self._note("trained", line.sessions)
            for reason, sessions in line.left_out.items():
                self._note(reason, sessions)

    def _note(self, reason: str, sessions: dict[str, list[tuple[int, int]]]) -> None:
        for session, ranges in sessions.items():
            for first, last in ranges:
                self.booked |= {(int(session), number): reason for number in range(first, last + 1)}

    def check(self, poisons: Iterable[Poison]) -> None:
        """AssertionError where poison was trained that can be known, or something honest was found out."""
        known = {(one.session, one.sequence): one for one in poisons}
        allowed = {"check": FOUND_OUT, "update": FOUND_OUT, "broker": ()}
        for key, one in known.items():
            found = self.booked.get(key)
            fine = (None, *NOT_LOOKED_AT, *allowed.get(one.outcome, ("trained",)))
            assert found in fine, f"{one.way} was booked {found}: {one}"
        guilty = {session for session, _ in known}
        for key, found in self.booked.items():
            if found in FOUND_OUT:
                assert key in known, f"fragment {key} of an honest actor was booked {found}"
                assert known[key].outcome in ("check", "update"), f"{known[key]} was booked {found}"
            assert found != "quarantined" or key[0] in guilty, f"an honest session was held: {key}"

    def unnamed(self, poisons: Iterable[Poison], ways: Iterable[Way]) -> set[str]:
        """The ways that the learner can know and of which it has found out no fragment yet."""
        of_way = {(one.session, one.sequence): one.way for one in poisons}
        found = {of_way[key] for key, reason in self.booked.items() if reason in FOUND_OUT and key in of_way}
        return {way.name for way in ways if way.outcome in ("check", "update")} - found

    def counts(self) -> dict[str, int]:
        counts: defaultdict[str, int] = defaultdict(int)
        for found in self.booked.values():
            counts[found] += 1
        return dict(counts)


def _newest(run_dir: Path) -> Lineage:
    """The chain of the newest checkpoint whose line is written: the learner may be writing one now."""
    chains = (
        read_lineage(run_dir / "lineage.jsonl", name)
        for name in CheckpointStore(run_dir / "checkpoints", KEPT).ids()
    )
    return next((chain for chain in chains if chain.lines), Lineage())
