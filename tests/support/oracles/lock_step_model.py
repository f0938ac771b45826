"""Lock-step as a few lines of Python.

Rounds, rosters and one fragment each (compare `tests.support.oracles.run_model`).
"""

import copy
from dataclasses import dataclass, field

from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason
from tests.support.oracles.run_model import Row


@dataclass
class Server:
    """What Redis holds of the rounds. most_credit: sequences that the budget would let one session begin."""

    actor_count: int
    most_credit: int
    round: int = 0
    is_open: bool = False
    session: int = 0
    acked: int = 0
    lost: int = 0
    roster: set[int] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    log: list[tuple[int, int]] = field(default_factory=list)

    def workers(self) -> list[int]:
        return [session for session, row in self.rows.items() if row.role is Role.ROLLOUT]

    def open_round(self) -> None:
        """Once enough workers are there each of them owes a fragment."""
        wanted = self.actor_count if self.round == 0 else 1
        if self.is_open or len(self.workers()) < wanted:
            return
        self.roster, self.is_open = set(self.workers()), True
        for session in self.roster:
            row = self.rows[session]
            row.begin_through = max(row.begin_through, row.sequence + 1)

    def open(self, actor: str, role: Role) -> int:
        for session, row in list(self.rows.items()):
            if row.actor == actor:
                self.close(session)
                self.superseded.add(session)
        self.session += 1
        self.rows[self.session] = Row(actor, role)
        self.open_round()
        return self.session

    def close(self, session: int) -> None:
        self.rows.pop(session, None)
        self.roster.discard(session)

    def append(self, session: int, acked: int, sequence: int) -> tuple[int, Reason | None]:
        """One fragment: last acknowledged, and why it was not taken."""
        row = self.rows.get(session)
        if row is None:
            return 0, Reason.FENCED if session in self.superseded else Reason.EXPIRED
        if row.returned:
            self._catch_up(row, acked)
        if acked > row.sequence:
            return row.sequence, Reason.GAP
        if sequence > row.sequence:
            if sequence > row.sequence + 1:
                return row.sequence, Reason.GAP
            if row.role is Role.ROLLOUT and sequence > max(row.begin_through, row.lenient_through):
                return row.sequence, Reason.INVALID
            row.sequence = sequence
            self._note_begun(row)
            self.acked += 1
            self.log.append((session, sequence))
            self.roster.discard(session)
        return row.sequence, None

    def _catch_up(self, row: Row, acked: int) -> None:
        row.returned = False
        lost = max(0, acked - row.sequence)
        self.acked, self.lost, row.sequence = self.acked + lost, self.lost + lost, row.sequence + lost
        if row.role is Role.ROLLOUT:
            row.lenient_through = row.sequence + 1 + self.most_credit + 1
            row.begin_through = max(row.sequence, min(row.begin_through, row.lenient_through))

    def watch(self, session: int, begun: int) -> Reason | None:
        """After a rewind a worker gets one sequence beyond what it has begun, and owes it."""
        row = self.rows.get(session)
        if row is None:
            return Reason.FENCED if session in self.superseded else Reason.EXPIRED
        if row.rewound and row.role is Role.ROLLOUT:
            row.begin_through, row.rewound = max(row.begin_through, begun) + 1, False
            self.roster.add(session)
        return None

    def is_complete(self, round_: int) -> bool:
        """Whether everybody on the roster of a round has appended or gone."""
        return round_ < self.round or (round_ == self.round and self.is_open and not self.roster)

    def publish(self, round_: int) -> None:
        """Weights for a round; one that is open or past stays as it is."""
        if round_ > self.round:
            self.round, self.is_open = round_, False
        self.open_round()

    def reopen(self, round_: int, jump: int) -> None:
        """Redis came back; the learner knows which round it has published for, and has read nothing."""
        if round_ > self.round:
            self.round, self.is_open, self.roster = round_, False, set()
        for row in self.rows.values():
            row.rewound = row.returned = True
        self.session += jump
        self.open_round()

    def snapshot(self) -> "Server":
        return copy.deepcopy(self)

    @staticmethod
    def _note_begun(row: Row) -> None:
        if row.role is Role.ROLLOUT:
            row.begin_through = max(row.begin_through, row.sequence)
