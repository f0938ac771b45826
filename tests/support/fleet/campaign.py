"""Ways to kill Redis that a random moment seldom meets."""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from penstock.launch.run.redis_service import ask
from tests.support.fleet.fleet import PATIENCE_S, Fleet, Kill, Member, Phase

MEET_S: Final = 5.0
"""How long a place is waited for, before Redis is killed wherever it is."""
IN_USE, IN_REWRITE, POWER_LOSS, OF_BOTH = "in use", "AOF rewrite", "power loss", "power loss of both"


def in_use(fleet: Fleet, _chance: random.Random) -> Kill:
    met = _meet(fleet, fleet.phase_at_redis)
    return fleet.kill("redis", IN_USE if met else "moment", met)


def in_rewrite(fleet: Fleet, chance: random.Random) -> Kill:
    place = fleet.sockets / "redis.sock"
    ask(place, b"CONFIG SET rdb-key-save-delay 500")
    ask(place, b"BGREWRITEAOF")
    met = _meet(fleet, lambda: _rewriting(place))
    time.sleep(chance.uniform(0.0, 0.1))  # how far the rewrite has got is what is drawn here
    return fleet.kill("redis", IN_REWRITE if met else "moment", met and _rewriting(place))


def power_loss(fleet: Fleet, chance: random.Random, *, of_both: bool = False) -> Kill:
    how = OF_BOTH if of_both else POWER_LOSS
    file = _append_only_file(fleet.folder / "redis")
    size, since = file.stat().st_size, time.monotonic()
    span_s = chance.uniform(0.05, 0.9)
    while time.monotonic() - since < span_s:
        fleet.pause()
    kill = fleet.kill("redis", how, _meet(fleet, fleet.phase_at_redis))
    if of_both and fleet.is_alive("learner"):
        fleet.kill("learner", how)
        fleet.start("learner")
    if _append_only_file(fleet.folder / "redis") == file and file.stat().st_size > size:
        os.truncate(file, size)
    return kill


WAYS: Final[dict[str, Callable[[Fleet, random.Random], Kill]]] = {
    "moment": lambda fleet, _chance: fleet.kill("redis"),
    IN_USE: in_use,
    IN_REWRITE: in_rewrite,
    POWER_LOSS: power_loss,
    OF_BOTH: partial(power_loss, of_both=True),
}


def _meet(fleet: Fleet, look: Callable[[], Phase | None]) -> Phase | None:
    """What `look` found in time; asked without a pause, as what is waited for is short."""
    deadline = time.monotonic() + MEET_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        fleet.check()
    return None


def _rewriting(place: Path) -> Phase | None:
    """A phase of Redis's own: it writes its file anew."""
    is_so = b"aof_rewrite_in_progress:1" in ask(place, b"INFO persistence")
    return Phase("aof.rewriting", 0, time.monotonic_ns()) if is_so else None


def _append_only_file(folder: Path) -> Path:
    """The one that is written to: the newest increment, or before Redis 7 the only file."""
    increments = sorted(
        (folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3])
    )
    return increments[-1] if increments else folder / "appendonly.aof"


POINTS: Final[dict[str, tuple[str, ...]]] = {
    "actor": (
        *("unroll.begun", "fragment.cut", "outbox.put", "report.sending", "session.opened"),
        *("append.sending", "append.answered", "append.acknowledged", "watch.answered"),
    ),
    "broker": (
        *("append.received", "append.sending", "append.stored", "append.answering"),
        *("report.sending", "report.stored", "watch.answering"),
    ),
    "learner": (
        *("update.before", "update.after", "write.before", "write.after", "fsync.before", "fsync.after"),
        *("rename.before", "rename.after", "commit.before", "commit.trimming", "commit.after"),
        *("publish.before", "publish.allocated", "publish.after", "lease.acquired", "log.opened"),
    ),
    "redis": (),
}
ONCE: Final = ("session.opened", "lease.acquired", "log.opened")
"""Places that a life comes by once."""
HITS: Final = {"actor": 20, "broker": 30, "learner": 6, "redis": 1}
"""A fail point is met for the n-th time, n at most this."""
LONGEST_TO_POINT_S: Final = 5.0
"""Who has not come to his fail point this long after his time is killed where he is."""
CUT_SHORT: Final = 0.1
"""What is left of a life while the campaign is behind its schedule."""
LONGEST_SLEEP_S: Final = 8.0
"""Longer than a session lives in a soak, and than anybody waits for Redis."""
WITHOUT_LEARNER_S: Final = 5.0
"""Redis's time begins without a learner that does not open the log for so long."""
IN_HAND: Final = {
    "actor": ("unroll", "fragment", "outbox", "append"),
    "broker": ("append", "report"),
    "learner": ("update", "publish", "commit", "feed", "lease", "log"),
}
"""How phases begin in which a process works for the run, and no longer at its own start."""
FAIL_POINT, ASLEEP = "fail point", "frozen"
SHORT: Final = 12
OF_ACTORS: Final = 2149
OF_BROKERS: Final = 182
"""Seeds of short campaigns whose first lives die at each fail point and at moments between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doom:
    """How a life ends.

    point: "" for none. after_s: since it first had something in hand. way: in which Redis is killed.
    frozen_s: it is frozen this long first, 0 for not at all, and killed in its sleep when `asleep`. busy:
    when its time has come it is killed as soon as it has something in hand.
    """

    point: str
    hit: int
    after_s: float
    way: str
    frozen_s: float
    asleep: bool
    busy: bool

    @property
    def rule(self) -> str:
        return f"{self.point}=kill@{self.hit}" if self.point else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a life lasts, in seconds.

    at_points: how often it ends at a fail point. ways: how Redis may be killed. freezes: how often it is
    frozen.
    """

    shortest_s: float = 0.1
    longest_s: float = 1.0
    at_points: float = 0.5
    ways: tuple[str, ...] = ("moment", IN_USE)
    freezes: float = 0.0


def draw(seed: int, name: str, life: int, pace: Pace) -> Doom:
    chance = random.Random(f"{seed}/{name}/{life}")
    role = name.partition("-")[0]
    at_point = bool(POINTS[role]) and chance.random() < pace.at_points
    point = chance.choice(POINTS[role]) if at_point else ""
    hit = 1 if point in ONCE else chance.randint(1, HITS[role])
    return Doom(
        point=point,
        hit=hit,
        after_s=chance.uniform(pace.shortest_s, pace.longest_s),
        way=chance.choice(pace.ways),
        frozen_s=chance.uniform(0.5, LONGEST_SLEEP_S) if chance.random() < pace.freezes else 0.0,
        asleep=chance.random() < 0.3,
        busy=chance.random() < 0.5,
    )


class Campaign:
    """The victims of a fleet and their dooms; `visit` does what is due now and never waits."""

    def __init__(
        self,
        fleet: Fleet,
        victims: Sequence[str],
        *,
        seed: int,
        pace: Pace | None = None,
        paces: Mapping[str, Pace] | None = None,
    ) -> None:
        """paces: by role; `pace` for all others."""
        self.fleet, self.victims, self.seed = fleet, tuple(victims), seed
        self._pace, self._paces = pace or Pace(), paces or {}
        self._busy_since: dict[str, float] = {}
        self._frozen_at: dict[str, float] = {}
        self._slept: set[tuple[str, int]] = set()
        self.behind = False
        """Lives that have begun are cut short, so that a slow machine sees as many kills as a fast one."""
        self._serves_since_ns: dict[int, int] = {}

    def run(self, kills: int, of: str = "") -> None:
        """Until so many of a role (default: of all) have been killed; then all live again, without dooms."""
        self.begin()
        within_s = PATIENCE_S + 20 * kills
        self.fleet.wait(lambda: self.visit() >= kills <= self.killed(of), f"{kills} kills", within_s)
        self.end()

    def killed(self, role: str = "") -> int:
        return sum(kill.role.startswith(role) for kill in self.fleet.log.kills)

    def begin(self) -> None:
        """Every victim into a doomed life; the others start as they are."""
        for name in self.fleet.members:
            if name in self.victims:
                self.live(name)
            else:
                self.fleet.start(name)

    def end(self, within_s: float = PATIENCE_S) -> None:
        """No fail points any more: who may still come to one begins a new life, uncounted; all serve."""
        for name in self.victims:
            member = self.fleet.members[name]
            if member.frozen and member.exit is None:
                self.fleet.thaw(name)
            if member.exit is not None:
                self._bury(member)
            elif self.doom(member).rule:
                self.fleet.end(name)
        self.fleet.start_all(within_s)

    def live(self, name: str) -> None:
        self._busy_since.pop(name, None)
        self.fleet.start(name, self._draw(name, self.fleet.members[name].lives + 1).rule)

    def doom(self, member: Member) -> Doom:
        return self._draw(member.name, member.lives)

    def _draw(self, name: str, life: int) -> Doom:
        return draw(self.seed, name, life, self._paces.get(name.partition("-")[0], self._pace))

    def visit(self) -> int:
        """Bury who is dead, kill whose time has come; the number of kills so far."""
        for name in self.victims:
            member = self.fleet.members[name]
            if member.exit is not None:
                self._bury(member)
                self.live(name)
            elif member.frozen:
                self._watch_sleep(member)
            elif self._is_due(member):
                self._end(member)
        return self.killed()

    def _is_due(self, member: Member) -> bool:
        now = time.monotonic()
        since = self._busy_since.get(member.name)
        if since is None:
            if self._has_begun(member):
                self._busy_since[member.name] = now
            return False
        doom = self.doom(member)
        late_s = now - since - doom.after_s * (CUT_SHORT if self.behind else 1.0)
        if doom.point or (doom.busy and not self._has_in_hand(member)):
            return late_s >= LONGEST_TO_POINT_S
        return late_s >= 0

    def _has_begun(self, member: Member) -> bool:
        return self._is_log_open(member) if member.name == "redis" else self._has_in_hand(member)

    def _has_in_hand(self, member: Member) -> bool:
        if member.name == "redis":
            return True  # its ways wait for what they need
        names = IN_HAND[member.name.partition("-")[0]]
        return any(not phase.is_idle and phase.name.startswith(names) for phase in member.phases())

    def _is_log_open(self, redis: Member) -> bool:
        """Whether the learner has renewed its lease, and so opened the log, since Redis serves.

        Or is away.
        """
        if not self.fleet.serves("redis"):
            return False
        served_ns = self._serves_since_ns.setdefault(redis.lives, time.monotonic_ns())
        if redis.lives == 1 and not any(map(self._has_begun, self._actors())):
            return False
        if time.monotonic_ns() - served_ns > WITHOUT_LEARNER_S * 10**9:
            return True
        learner = self.fleet.members["learner"].phases()
        return any(phase.name == "lease.waiting" and phase.at_ns > served_ns for phase in learner)

    def _actors(self) -> list[Member]:
        return [member for member in self.fleet.members.values() if member.name.startswith("actor")]

    def _end(self, member: Member) -> None:
        """Freeze it once in its life, when that is its doom; else kill it."""
        if self.doom(member).frozen_s and (member.name, member.lives) not in self._slept:
            self._slept.add((member.name, member.lives))
            self._frozen_at[member.name] = time.monotonic()
            self.fleet.freeze(member.name)
        else:
            self._kill(member)
            self.live(member.name)

    def _watch_sleep(self, member: Member) -> None:
        doom = self.doom(member)
        if time.monotonic() - self._frozen_at[member.name] < doom.frozen_s:
            return
        if doom.asleep:
            self.fleet.kill(member.name, ASLEEP)
            self.live(member.name)
        else:
            self.fleet.thaw(member.name)
            self._busy_since[member.name] = time.monotonic()

    def _kill(self, member: Member) -> None:
        if member.name == "redis":
            WAYS[self.doom(member).way](self.fleet, random.Random(f"{self.seed}/way/{member.lives}"))
            self._busy_since.pop("learner", None)  # it may have died as well
        else:
            self.fleet.kill(member.name, IN_USE if self.doom(member).busy else "moment")

    def _bury(self, member: Member) -> None:
        """A death at a fail point; any other one was not caused here and is an error."""
        doom, code = self.doom(member), member.exit.code if member.exit else None
        assert doom.rule, f"{member.name} ended with {code}: {self.fleet.last_line(member.name)}"
        assert code == -9, f"{member.name} ended with {code}: {self.fleet.last_line(member.name)}"
        kill = self.fleet.note_death(member.name, FAIL_POINT)
        assert not kill.idle, f"{member.name} died at a fail point, and was idle: {kill}"
