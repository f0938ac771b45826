"""One actor at a hundred times the rate of the others, and crowds of names and of held calls.

The others' acknowledgements go on, each fragment once and in order; of the flood nothing is stored.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest

from penstock.protocol.limits import MIB
from penstock.protocol.messages import Role
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import weights_pb2
from tests.support.abuse.stage import SETTLED_BY, Memory, Stage, session_of, staged
from tests.support.abuse.wire import EXPERIENCE, WEIGHTS, Answer, RawChannel, answer_of
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import fragment

HONEST: Final = 4
CALLS_PER_S: Final = 100.0
"""Budget of one connection: far below what a flood asks, so that the test sees it hold."""
PATIENCE_S: Final = 60.0
"""Of an honest call, which waits behind a thousand held ones that came at once."""
WINDOW: Final = 64
GROWTH_BYTES: Final = 64 * MIB
REFUSED_STREAM: Final = "error code 7"
"""How HTTP/2 says that a connection has more calls open than it may; nothing of this one was looked at."""


def _is_turned_away(answer: Answer) -> bool:
    if answer.code is grpc.StatusCode.UNAVAILABLE:
        return REFUSED_STREAM in answer.text
    return answer.code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture
def stage(short_folder: Path) -> Iterator[Stage]:
    with staged(short_folder, {"broker": {"max_calls_per_s": CALLS_PER_S}}) as ready:
        yield ready


class Crowd:
    """Honest actors, each sending its fragments one behind the other; `seconds` of every call."""

    def __init__(self, stage: Stage, fragments_each: int) -> None:
        self._stage, self._each = stage, fragments_each
        self.seconds: list[float] = []
        self.sessions: list[int] = []

    def work(self) -> None:
        with ThreadPoolExecutor(HONEST) as pool:
            list(pool.map(self._one, range(HONEST)))

    def _one(self, index: int) -> None:
        with SimulatedActor(self._stage.address, f"honest-{index}", deadline_s=PATIENCE_S) as actor:
            actor.open()
            self.sessions.append(actor.session)
            while actor.acked_through < self._each:
                if actor.acked_through >= actor.begin_through:
                    self._stage.learner.settle(SETTLED_BY)
                    actor.watch()
                    continue
                sequence = actor.acked_through + 1
                began = time.perf_counter()
                reply = actor.send(fragment(actor.session, sequence))
                self.seconds.append(time.perf_counter() - began)
                assert reply.acked_through == sequence, reply

    def p99_ms(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98] * 1000


def _in_order(stage: Stage, crowd: Crowd, each: int) -> None:
    """The log holds what the honest sent, each once and in order, and nothing else."""
    found: dict[int, list[int]] = {}
    after = 0
    while entries := stage.learner.read(after, 1000, 0):
        for entry in entries:
            assert entry.header is not None
            found.setdefault(entry.header.session, []).append(entry.header.sequence)
        after = entries[-1].number
    assert found == {session: list(range(1, each + 1)) for session in crowd.sessions}


@contextmanager
def _meanwhile(flood: Callable[[threading.Event], None]) -> Iterator[None]:
    """`flood(over)` runs in a thread of its own; what it raises is raised here."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(flood, over)
        try:
            yield
        finally:
            over.set()
        running.result()


class Flood:
    """Calls as fast as they go, WINDOW of them in flight."""

    def __init__(self, address: str, path: str, data: bytes, most: int) -> None:
        self._address, self._path, self._data, self._most = address, path, data, most
        self.seen: Counter[str] = Counter()
        self.begun = threading.Event()
        self.seconds = 0.0

    def __call__(self, over: threading.Event) -> None:
        flying: list[object] = []
        began = time.monotonic()
        with RawChannel(self._address) as channel:
            for _ in range(self._most):
                flying.append(channel.start(self._path, self._data))
                if len(flying) >= WINDOW:
                    self._note(answer_of(flying.pop(0)))
                if over.is_set():
                    break
            for future in flying:
                self._note(answer_of(future))
        self.seconds = time.monotonic() - began

    def _note(self, answer: Answer) -> None:
        assert _is_turned_away(answer), answer
        self.seen[answer.code.name] += 1
        self.begun.set()


def _floods(session: int) -> dict[str, tuple[str, bytes]]:
    gap = experience.AppendRequest(session=session, fragments=[to_proto(fragment(session, 9_000))])
    unfit = experience.AppendRequest(session=session, fragments=[to_proto(fragment(session, 1, run="run-b"))])
    watch = weights_pb2.WatchLatestRequest(session=session)
    return {
        "appends with a gap": (f"{EXPERIENCE}Append", gap.SerializeToString()),
        "appends that are refused": (f"{EXPERIENCE}Append", unfit.SerializeToString()),
        "watches": (f"{WEIGHTS}WatchLatest", watch.SerializeToString()),
    }


@pytest.mark.parametrize("name", ["appends with a gap", "appends that are refused", "watches"])
@pytest.mark.parametrize(
    ("calls", "each"),
    [(10_000, 40), pytest.param(100_000, 1_000, marks=pytest.mark.slow)],
    ids=["fast", "big"],
)
def test_one_actor_at_a_hundred_times_the_rate_does_not_stop_the_others(
    stage: Stage, name: str, calls: int, each: int
) -> None:
    memory = Memory(stage.broker.process.pid)
    quiet, crowd = Crowd(stage, each), Crowd(stage, each)
    with session_of(stage, "flood", Role.EVALUATION) as actor:
        flood = Flood(stage.address, *_floods(actor.session)[name], calls)
        quiet.work()
        resident = memory.resident()
        with _meanwhile(flood):
            assert flood.begun.wait(60)
            crowd.work()
    quiet.sessions += crowd.sessions
    _in_order(stage, quiet, each)
    print(f"{name}: {dict(flood.seen)}; p99 {quiet.p99_ms():.1f} ms quiet, {crowd.p99_ms():.1f} ms under it")
    assert flood.seen["OK"] <= CALLS_PER_S * (flood.seconds + 1) + 1
    assert memory.resident() - resident <= GROWTH_BYTES


def test_held_calls_of_one_peer_do_not_stop_the_others(stage: Stage) -> None:
    memory = Memory(stage.broker.process.pid)
    crowd = Crowd(stage, 40)
    with session_of(stage, "flood", Role.EVALUATION) as actor, ExitStack() as stack:
        known = weights_pb2.WatchLatestRequest(
            session=actor.session, wait_ms=30_000, known_version=2**40, known_revision=2**40
        )
        held = [
            channel.start(f"{WEIGHTS}WatchLatest", known.SerializeToString())
            for channel in (stack.enter_context(RawChannel(stage.address)) for _ in range(20))
            for _ in range(WINDOW)
        ]
        resident = memory.resident()
        crowd.work()
        stage.learner.publish(b"weights-2", update=1, settled=0, scalars={})
        for call in held:
            call.cancel()
    _in_order(stage, crowd, 40)
    assert memory.resident() - resident <= GROWTH_BYTES


@pytest.mark.parametrize("names", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flood_of_names_does_not_stop_who_works(short_folder: Path, names: int) -> None:
    with (
        staged(short_folder) as stage,
        session_of(stage, "honest") as honest,
        RawChannel(stage.address) as channel,
    ):
        assert honest.send(fragment(honest.session, 1)).acked_through == 1
        flying: list[object] = []
        for index in range(names):
            request = experience.OpenSessionRequest(actor_id=f"n-{index}", role=experience.ROLE_ROLLOUT)
            flying.append(channel.start(f"{EXPERIENCE}OpenSession", request.SerializeToString()))
            if len(flying) >= WINDOW:
                assert _is_turned_away(answer_of(flying.pop(0)))
        assert all(_is_turned_away(answer_of(future)) for future in flying)
        assert honest.send(fragment(honest.session, 2)).acked_through == 2
        assert channel.send("/penstock.v1.ControlService/Status", b"").code is grpc.StatusCode.OK
        assert stage.broker.get("/readyz")[0] == 200
