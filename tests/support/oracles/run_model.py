import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.broker.log.script import KEPT_COMMANDS, MAX_PENDING_COMMANDS
from penstock.protocol.messages import Role, RunState
from penstock.protocol.refusal import Reason


@dataclass
class Noted:
    """A command. through: newest entry of a flush, once decided. answer: JSON, once given."""

    request_id: str
    action: str
    argument: str
    through: int | None = None
    answer: str = ""


@dataclass
class Commands:
    newest: int = 0
    noted: dict[int, Noted] = field(default_factory=dict)
    desired: RunState = RunState.RUNNING

    def ask(self, request_id: str, action: str, argument: str) -> tuple[int, Reason | None]:
        """The number of the command, and why it is not taken."""
        for number, known in self.noted.items():
            if known.request_id == request_id:
                is_same = (known.action, known.argument) == (action, argument)
                return number, None if is_same else Reason.INVALID
        if len(self.pending()) >= MAX_PENDING_COMMANDS:
            return 0, Reason.FULL
        self.newest += 1
        self.noted[self.newest] = Noted(request_id, action, argument)
        self.noted.pop(self.newest - KEPT_COMMANDS, None)
        return self.newest, None

    def pending(self) -> list[int]:
        return [number for number, one in self.noted.items() if not one.answer]

    def answer(self, number: int, text: str) -> None:
        if number in self.noted:
            self.noted[number].answer = text

    def decide(self, number: int, newest_entry: int) -> None:
        """What a flush takes, once."""
        known = self.noted.get(number)
        if known is not None and known.through is None:
            known.through = newest_entry

    def control(self, action: str) -> RunState:
        self.desired = RunState.PAUSED if action == "pause" else RunState.RUNNING
        return self.desired


KEPT_COMMITS = 8


@dataclass
class Row:
    actor: str
    role: Role
    sequence: int = 0
    begin_through: int = 0
    given_back: int = 0
    rewound: bool = False
    returned: bool = False
    lenient_through: int = 0
    flushed: int = 0

    @property
    def credit(self) -> int:
        """Sequences that it has credit for and has not appended."""
        return self.begin_through - self.sequence - self.given_back

    def raise_to(self, sequence: int) -> None:
        self.sequence = sequence
        if self.role is Role.ROLLOUT:
            self.begin_through = max(self.begin_through, sequence)


@dataclass(frozen=True)
class Entry:
    """A fragment in the log."""

    session: int
    sequence: int
    charge: int
    total: int


@dataclass
class Weights:
    """Publications: which bytes are kept.

    `staged`: allocated by a publisher that has not moved the pointer.
    """

    counter: int = 1
    newest: int = 1
    before: int = 0
    kept: set[int] = field(default_factory=lambda: {1})
    pins: set[int] = field(default_factory=set)
    staged: set[int] = field(default_factory=set)

    def allocate(self) -> int:
        """A number that was never drawn."""
        self.counter += 1
        self.staged.add(self.counter)
        return self.counter

    def publish(self, pin: bool) -> int:
        version = self.allocate()
        self.staged.discard(version)
        self.kept.add(version)
        if pin:
            self.pins.add(version)
        self.before, self.newest = self.newest, version
        self.drop()
        return version

    def unpin(self, version: int) -> None:
        self.pins.discard(version)
        self.drop()

    def drop(self) -> None:
        self.kept &= {self.newest, self.before} | self.pins
        self.staged = {version for version in self.staged if version > self.newest}


@dataclass
class Server:
    budget: int
    charge: int
    most_entries: int
    epoch: int = 1
    number: int = 0
    total: int = 0
    settled: int = 0
    settled_total: int = 0
    acked: int = 0
    lost: int = 0
    session: int = 0
    closed: bool = False
    trim_floor: int = 0
    log: dict[int, Entry | None] = field(default_factory=dict)  # None: the marker that ends a hole
    rows: dict[int, Row] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)
    weights: Weights = field(default_factory=Weights)
    commands: Commands = field(default_factory=Commands)
    server_waits: bool = False
    """A policy server found no room: a fragment's room may be kept for it."""

    def most_credit(self) -> int:
        """Sequences that one session may have credit for."""
        return max(1, self.budget // self.charge)

    def outstanding(self) -> int:
        """Steps behind the settled position, and F for each sequence with credit."""
        rows = self.rows.values()
        begun = sum(row.credit for row in rows if row.role is Role.ROLLOUT)
        return self.total - self.settled_total + self.charge * begun

    def take(self, told: Mapping[int, tuple[int, int]], waiting: Collection[int]) -> None:
        """Take the credit that Redis gave, and hold it against the rules.

        Args:
            told: begin_through and the number of sequences given back, of each open session.
            waiting: sessions that wait for credit.
        """
        assert told.keys() == self.rows.keys()
        given = sum(self._take(self.rows[session], *numbers, waiting) for session, numbers in told.items())
        assert not given or self.outstanding() - self.charge < self.budget
        kept = self.charge if self.server_waits else 0
        assert not waiting or self.outstanding() + kept >= self.budget

    def _take(self, row: Row, through: int, given_back: int, waiting: Collection[int]) -> int:
        """Sequences that one session was given; of one that was rewound nothing is known but the most."""
        assert through >= row.begin_through
        known = row.credit
        row.begin_through, row.given_back = through, given_back
        if row.returned:
            assert row.credit <= self.most_credit()
            return 0
        given = row.credit - known
        assert given == 0 or (given > 0 and row.role is Role.ROLLOUT)
        # Second helpings are given only while no session waits.
        assert not (given and row.credit > 1 and waiting)
        return given

    def open(self, actor: str, role: Role) -> int:
        for session, row in list(self.rows.items()):
            if row.actor == actor:
                del self.rows[session]
                self.superseded.add(session)
        self.session += 1
        self.rows[self.session] = Row(actor, role)
        return self.session

    def watch(self, session: int, begun: int, flushed: int = 0) -> Reason | None:
        """Credit for one session, which says what it has flushed."""
        if self.closed:
            return Reason.NOT_READY
        if session not in self.rows:
            return self.gone(session)
        row = self.rows[session]
        row.flushed = flushed
        if row.rewound and row.role is Role.ROLLOUT:
            far = row.sequence + self.most_entries + self.most_credit()
            begun = min(begun, far if row.returned else row.lenient_through)
            row.begin_through, row.rewound = max(row.begin_through, begun) + 1, False
        return None

    def gone(self, session: int) -> Reason:
        """Why a session without a row is refused."""
        return Reason.FENCED if session in self.superseded else Reason.EXPIRED

    def give_back(self, session: int, begun: int) -> None:
        """What a session has credit for and has not begun is free."""
        row = self.rows[session]
        row.given_back += max(0, row.credit - max(0, begun - row.sequence))

    def append(self, session: int, acked: int, fragments: list[tuple[int, int]]) -> tuple[int, Reason | None]:
        """Fragments as (sequence, charge): last acknowledged, and why the next one was not taken."""
        if self.closed:
            return self.rows[session].sequence if session in self.rows else 0, Reason.FULL
        if session not in self.rows:
            return 0, self.gone(session)
        row = self.rows[session]
        if row.returned:
            self._catch_up(row, acked, len(fragments))
        reason = Reason.GAP if acked > row.sequence else None
        for sequence, charge in fragments:
            if reason is None and sequence > row.sequence:
                reason = self._why_not(row, sequence)
                if reason is None:
                    self._store(session, row, sequence, charge)
        return row.sequence, reason

    def _catch_up(self, row: Row, acked: int, sent: int) -> None:
        row.returned = False
        lost = acked - row.sequence
        if 0 < lost <= self.most_entries:
            self.acked, self.lost = self.acked + lost, self.lost + lost
            row.raise_to(acked)
        if row.role is Role.ROLLOUT:
            row.given_back = 0
            row.lenient_through = row.sequence + sent + self.most_credit() + 1
            row.begin_through = max(row.sequence, min(row.begin_through, row.lenient_through))

    def _why_not(self, row: Row, sequence: int) -> Reason | None:
        if sequence > row.sequence + 1:
            return Reason.GAP
        if row.role is Role.ROLLOUT and sequence > max(row.begin_through, row.lenient_through):
            return Reason.INVALID
        if len(self.log) >= self.most_entries:
            return Reason.FULL
        is_late = row.role is Role.ROLLOUT and row.credit == 0 and row.given_back > 0
        if (row.role is Role.SERVER or is_late) and self.outstanding() >= self.budget:
            self.server_waits |= row.role is Role.SERVER
            return Reason.FULL
        # Credit that was given back is given again.
        row.given_back -= is_late
        return None

    def _store(self, session: int, row: Row, sequence: int, charge: int) -> None:
        self.number, self.total, self.acked = self.number + 1, self.total + charge, self.acked + 1
        self.log[self.number] = Entry(session, sequence, charge, self.total)
        row.raise_to(sequence)
        self.server_waits &= row.role is not Role.SERVER

    def total_at(self, position: int) -> int:
        """Running total of steps at a position that has an entry, or of the newest before it."""
        if position >= self.number:
            return self.total
        before = [number for number in self.totals if number <= position]
        return self.totals[max(before)] if before else 0

    totals: dict[int, int] = field(default_factory=dict)

    def fence(self, epoch: int) -> Reason | None:
        """Why a learner with this epoch may not write."""
        if epoch < self.epoch or (epoch != self.epoch and not self.closed):
            return Reason.FENCED
        return Reason.NOT_READY if self.closed else None

    def settle(self, position: int) -> None:
        """Forward only."""
        if position > self.settled:
            self.settled = min(position, self.number)
            self.settled_total = self.total_at(self.settled)

    def note_totals(self) -> None:
        self.totals |= {number: entry.total for number, entry in self.log.items() if entry is not None}

    def trim(self, position: int) -> None:
        self.trim_floor = max(self.trim_floor, position)
        self.log = {number: entry for number, entry in self.log.items() if number > self.trim_floor}


@dataclass
class Memory:
    """What the learner knows."""

    epoch: int = 1
    version: int = 1
    number: int = 0
    total: int = 0
    settled: int = 0
    trim_floor: int = 0
    lost: int = 0
    session: int = 0
    command: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    def read(self, server: Server) -> None:
        for number, entry in server.log.items():
            if entry is None or number <= self.number:
                continue
            self.sequences[entry.session] = entry.sequence
            self.number, self.total = number, entry.total


def reopen(server: Server, memory: Memory, jump: int) -> None:
    """The maximum of both sides; the allocators leap by `jump`."""
    if memory.number > server.number:
        server.acked += memory.number - server.number
        server.number, server.total = memory.number, max(server.total, memory.total)
        server.log[server.number] = None
        server.totals[server.number] = server.total
    if memory.lost > server.lost:
        server.acked += memory.lost - server.lost
        server.lost = memory.lost
    for session, last in memory.sequences.items():
        row = server.rows.get(session)
        if row is not None and last > row.sequence:
            row.raise_to(last)
    server.session = max(server.session, memory.session, *memory.sequences, 0) + jump
    server.weights.counter = max(server.weights.counter, memory.version) + jump
    server.commands.newest = max(server.commands.newest, memory.command)
    known = {*server.commits, *memory.commits}
    server.commits = sorted(known, key=lambda text: json.loads(text)["checkpoint_id"])[-KEPT_COMMITS:]
    server.epoch = memory.epoch = memory.epoch + jump
    for row in server.rows.values():
        row.rewound = row.returned = True
    server.settled = max(server.settled, memory.settled)
    server.settled_total = server.total_at(server.settled)
    server.trim(memory.trim_floor)
    server.closed = False


def take_over(server: Server, memory: Memory, position: int, epoch: int, jump: int) -> None:
    """The next process of the same learner, with what its checkpoint knew; settled goes back to `position`.

    It has taken the lease at `epoch`, and leapt by `jump` where the log was closed.
    """
    server.epoch = memory.epoch = epoch
    if server.closed:
        reopen(server, memory, jump)
    server.weights.pins.clear()
    server.settled = min(position, server.number)
    server.settled_total = server.total_at(server.settled)
    memory.settled = position


def snapshot(server: Server) -> Server:
    return copy.deepcopy(server)
