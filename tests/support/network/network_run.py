"""A run whose actors reach the broker through a bad network: real broker, real Redis, shipped actor threads.

`Sender` is an actor without environment: link, session and outbox as they ship, fragments that name
themselves. `Reader` is the learner's side: it reads the log in order, settles and publishes. `balance`
compares what was acknowledged with what the log held.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import grpc
import numpy as np
import pytest

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.outbox import FragmentQueue, Outbox
from penstock.actor.link.session import Session, count_strikes, open_session
from penstock.broker.log.learner_log import LearnerLog
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Role
from penstock.rpc import channel
from penstock.rpc.auth import Credentials
from penstock.runtime.lifecycle import Lifecycle
from penstock.v1 import control_pb2, control_pb2_grpc, experience_pb2
from tests.support.network.proxy import Proxy
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually, open_run
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import CHARGE, SLOTS, STEPS, fragment
from tests.support.storage.redis_server import RedisServer

PATIENCE_S: Final = 60.0
LIVES: Final = 10**9
"""Fragments of a sender that goes on until it is asked to end."""
MOST_ENTRIES: Final = 10**6
"""The log is not trimmed here."""
_READ_MS: Final = 50
_RENEW_EVERY: Final = 20

Name = tuple[int, int]
"""Session and sequence number."""


def without_keepalive(patch: pytest.MonkeyPatch) -> None:
    """For channels from now on.

    Pings would notice a silence in the end, too, and hide that nothing else did.
    """
    kept = tuple(option for option in channel.CHANNEL_OPTIONS if "keepalive" not in option[0])
    patch.setattr(channel, "CHANNEL_OPTIONS", kept)


def own_fragment(session: int, sequence: int) -> Fragment:
    rewards = np.full((STEPS, SLOTS), session + sequence / 2**12, np.float32)
    rewards[0, 0] = sequence
    return fragment(session, sequence, reward=rewards)


def digest(payload: bytes | memoryview) -> str:
    return hashlib.sha256(payload).hexdigest()


def await_credit(actor: SimulatedActor, sequence: int) -> None:
    while actor.begin_through < sequence:
        actor.watch(wait_ms=1000, known_version=2**40, known_begin_through=actor.begin_through)


def append(actor: SimulatedActor, sequence: int) -> experience_pb2.AppendReply:
    await_credit(actor, sequence)
    return actor.send(own_fragment(actor.session, sequence))


class Reader(threading.Thread):
    """The learner's side. `read` holds the name and payload digest of every entry, in order."""

    def __init__(self, log: LearnerLog) -> None:
        super().__init__(name="reader", daemon=True)
        self.log = log
        self.read: list[tuple[Name, str]] = []
        self.error: BaseException | None = None
        self.publishes = True
        """False: what was read is settled without new weights."""
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            turn = position = 0
            while not self._ended.is_set():
                turn += 1
                position = self._take(position)
                if turn % _RENEW_EVERY == 0:
                    self.log.renew()
        except BaseException as error:  # noqa: BLE001 - raised again by `stop`
            self.error = error

    def stop(self) -> None:
        """End the thread; raises what ended it."""
        self._ended.set()
        self.join(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def _take(self, position: int) -> int:
        entries = self.log.read(position, 64, _READ_MS)
        if not entries:
            return position
        payloads = self.log.fetch([entry.number for entry in entries])
        for entry, payload in zip(entries, payloads, strict=True):
            assert entry.header is not None
            assert payload is not None
            self.read.append(((entry.header.session, entry.header.sequence), digest(payload)))
        if self.publishes:
            self.log.publish(b"w", update=len(self.read), settled=entries[-1].number, scalars={})
        else:
            self.log.settle(entries[-1].number)
        return entries[-1].number


def _may_go_on(session: Session, sequence: int, stop: threading.Event) -> bool:
    return session.credit.begin_through >= sequence or session.is_over or stop.is_set()


class Sender(threading.Thread):
    """An actor that sends `count` fragments as credit comes.

    What ends a session is handled as a worker does.
    """

    def __init__(self, address: str, actor_id: str, count: int = LIVES, *, outbox: int = 4) -> None:
        super().__init__(name=actor_id, daemon=True)
        self.broker_client = BrokerClient(address, Credentials())
        self.lifecycle = Lifecycle("actor")
        self.sent: dict[Name, str] = {}
        self.acked: dict[int, int] = {}
        """Acknowledged through, by session."""
        self.error: BaseException | None = None
        self._count, self._capacity = count, outbox
        self._outbox: Outbox | None = None

    @property
    def acknowledged(self) -> int:
        current = self._outbox.acked_through if self._outbox else 0
        return sum(self.acked.values()) + current

    def run(self) -> None:
        strikes = 0
        try:
            while self.acknowledged < self._count and not self.lifecycle.draining.is_set():
                session = open_session(self.broker_client, self.name, Role.ROLLOUT, self.lifecycle)
                if session is None:
                    return
                self._serve(session)
                if session.ended is not None:
                    acknowledged = self.acked[session.number] > 0
                    strikes = count_strikes(strikes, session.ended, acknowledged=acknowledged)
        except BaseException as error:  # noqa: BLE001 - raised again by `finish`
            self.error = error
        finally:
            self.broker_client.close()

    def finish(self) -> None:
        """Wait for its end; raises what ended it."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"{self.name} did not end"
        if self.error is not None:
            raise self.error

    def drain(self) -> None:
        """Ask it to end as SIGTERM does: flush, close, end."""
        self.lifecycle.drain("the test is over")
        self.finish()

    def _serve(self, session: Session) -> None:
        session.start()
        outbox = self._outbox = Outbox(session, FragmentQueue(self._capacity))
        outbox.start()
        try:
            with self.lifecycle.calling_on_drain(session.notify_waiters):
                self._send(session, outbox, self._count - self.acknowledged)
            outbox.flush(PATIENCE_S)
            session.check()
        finally:
            self._outbox, self.acked[session.number] = None, outbox.acked_through
            session.close(politely=not session.is_over)

    def _send(self, session: Session, outbox: Outbox, count: int) -> None:
        stop = self.lifecycle.draining
        for sequence in range(1, count + 1):
            session.wait_until(partial(_may_go_on, session, sequence, stop))
            if session.is_over or stop.is_set():
                return
            made = own_fragment(session.number, sequence)
            session.begin(sequence)
            self.sent[session.number, sequence] = digest(made.payload)
            if not outbox.put(made, stop):
                return


def balance(reader: Reader, senders: Iterable[Sender], acked_by_script: int) -> int:
    """Every promise about what was acknowledged, or AssertionError; returns the number acknowledged.

    Each session's part of the log is 1..n in order, without gap or double, with the payloads that were sent;
    n is at least what was acknowledged; and the append script counted exactly what the log held.
    """
    sent = {name: sha for sender in senders for name, sha in sender.sent.items()}
    acked = {session: through for sender in senders for session, through in sender.acked.items()}
    held: dict[int, list[int]] = {}
    for (session, sequence), sha in reader.read:
        assert sent[session, sequence] == sha, f"payload of {session}/{sequence} is not what was sent"
        held.setdefault(session, []).append(sequence)
    for session, sequences in held.items():
        assert sequences == list(range(1, len(sequences) + 1)), f"session {session}: {sequences}"
    lost = {
        s: through - len(held.get(s, [])) for s, through in acked.items() if through > len(held.get(s, []))
    }
    assert not lost, f"acknowledged and not in the log, by session: {lost}"
    assert acked_by_script == len(reader.read)
    return sum(acked.values())


@dataclass(kw_only=True)
class NetworkRun:
    """Redis, broker, proxy before the broker, reader; senders that were started."""

    server: RedisServer
    broker: BrokerProcess
    proxy: Proxy
    reader: Reader
    senders: list[Sender] = field(default_factory=list)

    def start(self, actors: int, count: int = LIVES, **options: Any) -> Self:
        known = len(self.senders)
        new = [Sender(self.proxy.address, f"a-{known + i}", count, **options) for i in range(actors)]
        self.senders += new
        for sender in new:
            sender.start()
        return self

    def finish(self) -> int:
        """Wait until every sender has sent its count; balance the books."""
        while any(sender.is_alive() for sender in self.senders):
            reached = self.acknowledged()
            eventually(lambda: self.is_sound() and self._is_beyond(reached), "the senders", PATIENCE_S)  # noqa: B023 - called at once
        for sender in self.senders:
            sender.finish()
        return self._balance()

    def drain(self) -> int:
        """Ask every sender to end; balance the books."""
        for sender in self.senders:
            sender.lifecycle.drain("the test is over")
        return self.finish()

    def acknowledged(self) -> int:
        return sum(sender.acknowledged for sender in self.senders)

    def grow(self, by: int, what: str = "acknowledgements") -> None:
        """Wait for so many more acknowledgements; patience is for the next one."""
        reached = self.acknowledged()
        wanted = reached + by
        while reached < wanted:
            eventually(lambda: self.is_sound() and self.acknowledged() > reached, what, PATIENCE_S)  # noqa: B023 - called at once
            reached = self.acknowledged()

    def is_sound(self) -> bool:
        """True; raises what ended the reader or a sender."""
        for error in (self.reader.error, *(sender.error for sender in self.senders)):
            if error is not None:
                raise error
        return True

    def sessions(self) -> Counter[str]:
        return Counter({sender.name: len({s for s, _ in sender.sent}) for sender in self.senders})

    def metric(self, name: str) -> float:
        return self.broker.metric(name)

    def broker_status(self, field_: str) -> int:
        """A field of the broker's /proc status: VmRSS in KiB, Threads."""
        text = Path(f"/proc/{self.broker.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{field_}:")))

    def broker_files(self) -> int:
        return len(list(Path(f"/proc/{self.broker.process.pid}/fd").iterdir()))

    def open_sessions(self) -> int:
        with grpc.insecure_channel(self.broker.address) as line:
            stub = control_pb2_grpc.ControlServiceStub(line)
            return len(stub.Status(control_pb2.StatusRequest(), timeout=5).sessions)

    def _is_beyond(self, reached: int) -> bool:
        return self.acknowledged() > reached or not any(sender.is_alive() for sender in self.senders)

    def _balance(self) -> int:
        acked = self.reader.log.acked()
        eventually(lambda: self.is_sound() and len(self.reader.read) >= acked, "the reader", PATIENCE_S)
        self.reader.stop()
        return balance(self.reader, self.senders, self.reader.log.acked())


@contextmanager
def network_run(
    server: RedisServer,
    folder: Path,
    *,
    budget: int = 64 * CHARGE,
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    **run: Any,
) -> Iterator[NetworkRun]:
    """A run that is up; everything is ended at the end, whatever happened."""
    with ExitStack() as stack:
        log = open_run(server.url, budget=budget, wait_s=PATIENCE_S, max_log_entries=MOST_ENTRIES, **run)
        stack.callback(log.close)
        broker = stack.enter_context(harness.broker(server.url, folder / "broker", settings=settings))
        proxy = stack.enter_context(Proxy(broker.address, seed=seed))
        reader = Reader(log)
        run_ = NetworkRun(server=server, broker=broker, proxy=proxy, reader=reader)
        reader.start()
        try:
            yield run_
        finally:
            for sender in run_.senders:
                sender.lifecycle.drain("the test is over")
                sender.broker_client.close()
            reader._ended.set()
            reader.join(PATIENCE_S)
