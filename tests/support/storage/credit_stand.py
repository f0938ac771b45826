"""The scripts of the run with a clock that is set by hand: hours pass in seconds, and twice the same."""

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from redis.exceptions import NoScriptError

from penstock.broker.log import keys, replies, script
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Pacing, Scope, unpack
from penstock.broker.log.script import load
from penstock.protocol.limits import STAGING_EXPIRY_S

CLOCK: Final = "virtual:ms"
"""The key that holds the time, in milliseconds."""
_REAL: Final = "redis.call('TIME')"
_NOW: Final = f"redis.call('GET', '{CLOCK}')"
_VIRTUAL: Final = f"{{math.floor({_NOW} / 1000), {_NOW} % 1000 * 1000}}"


class Clock:
    """The time of the scripts on the server of `client`."""

    def __init__(self, client: Any, now_ms: int) -> None:
        self._client = client
        self.now_ms = now_ms
        self.set()

    def advance(self, ms: int) -> None:
        self.now_ms += ms
        self.set()

    def set(self) -> None:
        """Tell the server; again after it has forgotten everything."""
        self._client.set(CLOCK, self.now_ms)


@contextmanager
def virtual_time() -> Iterator[None]:
    read = script.read_source
    script.load.cache_clear()
    script.read_source = lambda name: read(name).replace(_REAL, _VIRTUAL)
    try:
        yield
    finally:
        script.read_source = read
        script.load.cache_clear()


CHARGE: Final = 10
"""Steps of a fragment."""
RETRY_MS: Final = 50
LOOK_MS: Final = 10_000
RENEW_MS: Final = 1_000
START_MS: Final = 1_000_000
TIMEOUT_MS: Final = 30_000
_NEVER_MS: Final = 10**15
_END: Final = b"end"


SLOWER: Final = 10
"""A slow actor's fragments take so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Which actors take part in which run.

    Attributes:
        actors: how many there are.
        budget: most fragments that may be outstanding.
        batch: fragments of an update.
        slow: number of actors whose fragments take `SLOWER` times as long.
        hung: number of actors that end no fragment after their first `hung_after`.
        fragment_ms: mean time of a fragment of an actor that is not slow; each takes between half and one and
            a half of it.
        weights_first: whether the first weights are published before the actors connect.
        lock_step: staleness 0; each round takes a fragment of every actor.
    """

    actors: int
    budget: int
    batch: int
    slow: int = 0
    hung: int = 0
    hung_after: int = 1
    fragment_ms: int = 1_000
    weights_first: bool = True
    lock_step: bool = False

    @property
    def rest(self) -> range:
        """The actors that are neither slow nor hung, by index; the slow come first, then the hung."""
        return range(self.slow + self.hung, self.actors)

    def make(self) -> "list[Actor]":
        return [self._actor(index) for index in range(self.actors)]

    def _actor(self, index: int) -> "Actor":
        is_hung = self.slow <= index < self.slow + self.hung
        time_ms = self.fragment_ms * (SLOWER if index < self.slow else 1)
        return Actor(f"actor-{index:04d}", time_ms, self.hung_after if is_hung else None)


@dataclass(slots=True)
class Actor:
    """One of them. ends_after: a hung one ends so many fragments."""

    name: str
    fragment_ms: int
    ends_after: int | None = None
    session: int = 0
    acked: int = 0
    begun: int = 0
    through: int = 0
    waits: bool = False

    @property
    def may_begin(self) -> bool:
        return self.begun == self.acked and self.through > self.begun

    @property
    def hangs(self) -> bool:
        return self.ends_after is not None and self.begun > self.ends_after


@dataclass(slots=True)
class Outcome:
    """What happened.

    Attributes:
        crowd: the actors and the run.
        fragments: (milliseconds, actor) of each fragment that was appended.
        updates: milliseconds of each update.
        most_outstanding: the most that was outstanding at once, in fragments.
        looks: watches that reached Redis.
        vain_looks: watches that brought no credit.
    """

    crowd: Crowd
    fragments: list[tuple[int, int]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    most_outstanding: float = 0.0
    looks: int = 0
    vain_looks: int = 0

    def rounds_until_all(self, actors: Collection[int]) -> float:
        """Rounds of the budget until each of these actors has appended; infinite if one never did."""
        missing = set(actors)
        for number, (_, actor) in enumerate(self.fragments, 1):
            missing.discard(actor)
            if not missing:
                return math.ceil(number / self.crowd.budget)
        return math.inf

    def count(self, actors: Collection[int], since_ms: int, until_ms: int) -> int:
        return sum(since_ms <= at < until_ms and actor in actors for at, actor in self.fragments)


class Stand:
    """One run of a crowd. client: a `redis.Redis` of an empty server, within `virtual_time`."""

    def __init__(self, client: Any, url: str, crowd: Crowd, seed: int = 0) -> None:
        self._redis, self.crowd, self._random = client, crowd, random.Random(seed)
        self.clock = Clock(client, START_MS)
        self.log = LearnerLog.connect(url, wait_s=5.0)
        self._events: list[tuple[int, float, int, Callable[[], None]]] = []
        self._told = client.pubsub()
        self._told.subscribe(keys.CHANGED)
        self._pending = self._position = self._round = self._count = 0
        self.outcome = Outcome(crowd)
        self.actors = crowd.make()
        self._by_session: dict[int, Actor] = {}

    def close(self) -> None:
        self._told.close()
        self.log.close()

    def run(self, for_ms: int) -> Outcome:
        crowd = self.crowd
        began_ms = self._open_run()
        if crowd.weights_first:
            self._publish()
        order = list(self.actors)
        self._random.shuffle(order)
        for place, actor in enumerate(order):
            self._open(actor)
            self._at(LOOK_MS * place // crowd.actors + 1, partial(self._look_for_ever, actor))
        if not crowd.weights_first:
            self._publish()
        self._at(RENEW_MS, self._renew)
        self._pass(began_ms + for_ms)
        self.outcome.updates = [at - began_ms for at in self.outcome.updates]
        self.outcome.fragments = [(at - began_ms, index) for at, index in self.outcome.fragments]
        return self.outcome

    def _open_run(self) -> int:
        """Open the log and let one timeout pass, in which no session loses credit; returns the time."""
        crowd = self.crowd
        self.log.acquire("run", "learner", _NEVER_MS)
        pacing = Pacing(
            budget=crowd.budget * CHARGE,
            fragment_charge=CHARGE,
            actor_count=crowd.actors if crowd.lock_step else 1,
            lock_step=crowd.lock_step,
            session_timeout_ms=TIMEOUT_MS,
            max_log_bytes=2**40,
            max_log_entries=2**30,
        )
        self.log.start(b"specification", pacing)
        until_ms = self.clock.now_ms + TIMEOUT_MS
        while self.clock.now_ms <= until_ms:
            self.clock.advance(RENEW_MS)
            self.log.renew()
        return self.clock.now_ms

    def _pass(self, until_ms: int) -> None:
        while self._events and self._events[0][0] < until_ms:
            at, _, _, event = heapq.heappop(self._events)
            self.clock.now_ms = at
            self.clock.set()
            event()

    def _at(self, in_ms: int, event: Callable[[], None]) -> None:
        # Events of one moment happen in random order.
        self._count += 1
        heapq.heappush(self._events, (self.clock.now_ms + in_ms, self._random.random(), self._count, event))

    def _script(self, name: str, *arguments: Any, staged: tuple[str, ...] = ()) -> Any:
        script = load(name)
        given = (len(staged), *staged, *arguments, "")
        try:
            answer = self._redis.evalsha(script.sha1, *given)
        except NoScriptError:
            answer = self._redis.eval(script.source, *given)
        return unpack(answer)[1]

    def _open(self, actor: Actor) -> None:
        reply = self._script("open_session", actor.name, 1, "")
        actor.session, actor.through = int(reply[1]), int(reply[3])
        self._by_session[actor.session] = actor
        self._begin(actor)
        self._look(actor)
        self._wake()

    def _look_for_ever(self, actor: Actor) -> None:
        self._look(actor)
        self._at(LOOK_MS, partial(self._look_for_ever, actor))
        self._wake()

    def _look(self, actor: Actor) -> None:
        reply = self._script("watch", actor.session, actor.begun, 0, "", 0, 0)
        self.outcome.looks += 1
        self.outcome.vain_looks += int(reply[1]) <= actor.through
        actor.through, actor.waits = int(reply[1]), bool(reply[13])
        self._begin(actor)

    def _begin(self, actor: Actor) -> None:
        if not actor.may_begin:
            return
        actor.begun += 1
        if not actor.hangs:
            takes_ms = max(1, round(actor.fragment_ms * self._random.uniform(0.5, 1.5)))
            self._at(takes_ms, partial(self._append, actor))

    def _append(self, actor: Actor) -> None:
        key = f"{keys.STAGING}{actor.session}"
        self._redis.set(key, b"payload", ex=STAGING_EXPIRY_S)
        fragment = (actor.begun, CHARGE, 1, 7, b"header", 1)
        reply = self._script("append", actor.session, actor.acked, *fragment, staged=(key,))
        actor.through, actor.waits = int(reply[4]), bool(reply[11])
        self.outcome.most_outstanding = max(self.outcome.most_outstanding, int(reply[7]) / CHARGE)
        if reply[0] == b"OK":
            self._note_appended(actor)
        else:
            assert reply[1] == b"pacing", reply
            self._at(RETRY_MS, partial(self._append, actor))
        self._wake()
        self._learn()

    def _note_appended(self, actor: Actor) -> None:
        actor.acked = actor.begun
        self.outcome.fragments.append((self.clock.now_ms, self.actors.index(actor)))
        self._pending, self._position = self._pending + 1, self._position + 1
        self._begin(actor)

    def _learn(self) -> None:
        if self.crowd.lock_step:
            if self._pending and self.log.round_complete(self._round):
                self._round += 1
                self._update()
        else:
            while self._pending >= self.crowd.batch:
                self._update()

    def _update(self) -> None:
        self._pending = 0 if self.crowd.lock_step else self._pending - self.crowd.batch
        self.outcome.updates.append(self.clock.now_ms)
        self._publish()

    def _publish(self) -> None:
        settled = self._position - self._pending
        opens = self._round if self.crowd.lock_step else None
        update = len(self.outcome.updates)
        self.log.publish(b"weights", update=update, settled=settled, scalars={}, round=opens)
        self._wake()

    def _renew(self) -> None:
        self.log.renew()
        self._at(RENEW_MS, self._renew)
        self._wake()
        self._learn()

    def _wake(self) -> None:
        """Let those actors look that the messages name; what they do may name others."""
        while woken := dict.fromkeys(actor.session for actor in self._woken()):
            for session in woken:
                self._look(self._by_session[session])

    def _woken(self) -> Iterator[Actor]:
        self._redis.publish(keys.CHANGED, _END)
        while (message := self._told.get_message(timeout=5.0)) is None or message["data"] != _END:
            if message is None or message["type"] != "message":
                continue
            change = replies.change(message["data"])
            yield from (self._by_session[session] for session in change.sessions)
            if change.scope is not Scope.NAMED:
                is_all = change.scope is Scope.ALL
                yield from (actor for actor in self._by_session.values() if is_all or not actor.waits)
