"""WeightService: newest weights, credit to generate and run state on their way down.

WatchLatest looks, and holds the call until there is something that the caller does not know, its wait
is over or the broker drains. While Redis does not answer it says NOT_READY and never fails. Of weights that
do not fit into its reply it names the version that the session is to fetch, whose bytes stay until it has
them.
"""

import asyncio
import hashlib
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from penstock.broker.log.replies import Change, Scope
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.admission import LastCredit, SessionOwners, check_number, redis_down
from penstock.config.configuration_error import how_to_install
from penstock.protocol.append import write_around
from penstock.protocol.limits import (
    MAX_NUMBER,
    MAX_PROBE_ANSWERS,
    MAX_WATCH_WAIT_MS,
    MAX_WEIGHT_BYTES,
    MIB,
    WEIGHT_CHUNK_BYTES,
)
from penstock.protocol.messages import News, Publication, Watch
from penstock.protocol.refusal import Reason, Refusal
from penstock.registry.records import PolicyVersion, RegistryError, Traffic, Unavailable, UnknownVersion
from penstock.rpc.gate import Absent, Context, Malformed
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint
from penstock.v1 import control_pb2 as pb_messages
from penstock.v1 import weights_pb2 as pb
from penstock.v1.weights_pb2_grpc import WeightServiceServicer

if TYPE_CHECKING:
    from penstock.registry.registry import Registry


# ---- Wakes the held WatchLatest calls of this broker when something in the run changes for them.

GAP_S: Final = 0.02
"""Many are woken at most this often: each look of each of them asks Redis."""
LOOK_AGAIN_S: Final = 5.0
"""A call whose last look is as old as this looks again at the next heartbeat, in case a message was lost."""


class Held:
    """A call that is held. waits: its session has no credit, and its turn is to come."""

    def __init__(self) -> None:
        self.waits = False
        self.is_newest = True
        self._woken = asyncio.Event()
        self._looked_s = -math.inf

    def begin_look(self) -> None:
        """From now on a change ends the next wait."""
        self._woken.clear()
        self._looked_s = asyncio.get_running_loop().time()

    async def wait(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        self._woken.set()

    def is_old(self, now_s: float) -> bool:
        return now_s - self._looked_s >= LOOK_AGAIN_S


class Changes:
    """One per event loop."""

    def __init__(self) -> None:
        self.closed = False
        self._held: dict[int, Held] = {}
        self._pending = Scope.NAMED
        self._woke_s = -math.inf
        self._later: asyncio.TimerHandle | None = None

    @contextmanager
    def holding(self, session: int) -> Iterator[Held]:
        """A call of a session is held. Of several only the newest looks on."""
        held, older = Held(), self._held.get(session)
        if older is not None:
            older.is_newest = False
            older.wake()
        self._held[session] = held
        try:
            yield held
        finally:
            if self._held.get(session) is held:
                del self._held[session]

    def note_waiting(self, session: int, waits: bool) -> None:
        """A reply to another call of this session said whether it waits for credit."""
        held = self._held.get(session)
        if held is not None:
            held.waits = waits

    async def follow(self, source: AsyncIterator[Change | None]) -> None:
        """Wake for every change of `source`, for ever; None is a heartbeat."""
        async for change in source:
            if change is None:
                now_s = asyncio.get_running_loop().time()
                self._wake(held for held in self._held.values() if held.is_old(now_s))
                continue
            self._wake(held for session in change.sessions if (held := self._held.get(session)))
            if change.scope is not Scope.NAMED:
                self._wake_many(change.scope)

    def close(self) -> None:
        """Wake everybody, now and from now on."""
        self.closed = True
        self._wake(self._held.values())

    def _wake_many(self, scope: Scope) -> None:
        loop = asyncio.get_running_loop()
        self._pending = max(self._pending, scope)
        missing_s = self._woke_s + GAP_S - loop.time()
        if self._later is not None:
            return
        if missing_s > 0:
            self._later = loop.call_later(missing_s, self._wake_pending)
        else:
            self._wake_pending()

    def _wake_pending(self) -> None:
        scope, self._pending = self._pending, Scope.NAMED
        self._later, self._woke_s = None, asyncio.get_running_loop().time()
        self._wake(held for held in self._held.values() if scope is Scope.ALL or not held.waits)

    @staticmethod
    def _wake(calls: Iterable[Held]) -> None:
        for held in calls:
            held.wake()


# ---- The weights that actors ask for, kept as the chunks that Redis holds.

MAX_CACHED_BYTES: Final = 256 * MIB
"""Of all versions together; a larger version is read through chunk by chunk."""

ReadChunk = Callable[[int, int], Awaitable[bytes | None]]


class CorruptWeights(RuntimeError):
    """Redis holds bytes that are not the published ones."""


class WeightCache:
    """`read_chunk(version, index)` answers None where the chunk does not exist (any more)."""

    def __init__(self, read_chunk: ReadChunk) -> None:
        self._read_chunk = read_chunk
        self._lock = asyncio.Lock()
        self._held: dict[int, tuple[Publication, list[bytes]]] = {}
        """By version; the one that was asked for longest ago comes first."""

    def publication(self, version: int) -> Publication | None:
        held = self._held.get(version)
        return None if held is None else held[0]

    async def chunk(self, publication: Publication, index: int) -> bytes | None:
        """Chunk `index` of a version; None when Redis no longer holds it. At most 1 MiB, never copied."""
        if index == 0 and not self._holds(publication) and publication.size <= MAX_CACHED_BYTES:
            await self._load(publication)
        if not self._holds(publication):
            return await self._read_chunk(publication.version, index)
        held = self._held[publication.version] = self._held.pop(publication.version)
        return held[1][index] if index < len(held[1]) else b""

    def _holds(self, publication: Publication) -> bool:
        return self.publication(publication.version) == publication

    async def _load(self, publication: Publication) -> None:
        async with self._lock:
            if self._holds(publication):
                return
            chunks: list[bytes] = []
            digest = hashlib.sha256()
            for index in range(-(-publication.size // WEIGHT_CHUNK_BYTES)):
                chunk = await self._read_chunk(publication.version, index)
                if chunk is None:
                    return
                digest.update(chunk)
                chunks.append(chunk)
            _verify(publication, digest.hexdigest())
            self._held.pop(publication.version, None)
            self._held[publication.version] = (publication, chunks)
            while sum(kept.size for kept, _ in self._held.values()) > MAX_CACHED_BYTES:
                del self._held[next(iter(self._held))]


def _verify(publication: Publication, sha256: str) -> None:
    if sha256 != publication.sha256:
        raise CorruptWeights(
            f"version {publication.version}: Redis holds sha256 {sha256[:12]}…, "
            f"published was {publication.sha256[:12]}…; the learner's next publication replaces it"
        )


_SHA256 = re.compile(r"[0-9a-f]{64}|")


class WeightService(WeightServiceServicer):
    """Serves WeightService: newest weights, credit and run state."""

    def __init__(
        self,
        store: Store,
        cache: WeightCache,
        changes: Changes,
        owners: SessionOwners,
        last_credit: LastCredit,
    ) -> None:
        """last_credit: through which sequence a session was told to begin, with its Appends."""
        self._store, self._cache, self._changes, self._owners = store, cache, changes, owners
        self._last_credit, self._last_evaluations = last_credit, LastCredit()

    def forget(self) -> None:
        """No evaluation was asked of the sessions of another incarnation of the run."""
        self._last_evaluations.forget()

    async def WatchLatest(  # type: ignore[override] # written here
        self, request: pb.WatchLatestRequest, context: Context
    ) -> bytes:
        watch = read_watch(request)
        with metrics.WATCHERS.track_inprogress():
            try:
                await self._owners.check(watch.session, context)
                watched = await self._look_until_news(watch)
            except StoreUnavailable as error:
                watched = redis_down(Reason.NOT_READY, error)
        if isinstance(watched, Refusal):
            metrics.REFUSALS.labels(reason=watched.reason.label).inc()
            return pb.WatchLatestReply(refusal=watched.to_proto()).SerializeToString()
        # A reply that gets lost costs one wait: the next call is told again when its wait ends.
        self._last_evaluations.note(watch.session, watched.evaluate_version)
        failpoint("watch.answering", watched.latest.version)
        return write_news(watched, await self._new_weights(watch, watched))

    async def _look_until_news(self, watch: Watch) -> News | Refusal:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + watch.wait_ms / 1000
        with self._changes.holding(watch.session) as held:
            while True:
                held.begin_look()
                news, held.waits = await self._look(watch)
                is_over = self._changes.closed or loop.time() >= deadline
                if is_over or isinstance(news, Refusal) or self._is_new(watch, news):
                    return news
                watch = replace(watch, probe_log_prob=())
                await held.wait(deadline - loop.time())
                if not held.is_newest:
                    return news

    async def _look(self, watch: Watch) -> tuple[News | Refusal, bool]:
        watched = await self._store.watch(watch)
        outcome = watched.refusal or watched.news
        if outcome is None:
            raise RuntimeError("the store answered neither news nor a refusal")
        # What the caller lacks and is too large to come with the reply.
        if (
            isinstance(outcome, News)
            and outcome.latest.version > watch.known_version
            and outcome.latest.size > WEIGHT_CHUNK_BYTES
        ):
            found = await self._store.begin_fetch(watch.session, watch.known_version)
            outcome = replace(outcome, latest=found or outcome.latest)
        return outcome, watched.waits

    def _is_new(self, watch: Watch, news: News) -> bool:
        return (
            news.latest.version > watch.known_version
            or news.credit.begin_through > max(watch.known_begin_through, self._last_credit[watch.session])
            or news.revision > watch.known_revision
            or news.evaluate_version != self._last_evaluations[watch.session]
        )

    async def _new_weights(self, watch: Watch, news: News) -> bytes:
        publication = news.latest
        if publication.version <= watch.known_version or publication.size > WEIGHT_CHUNK_BYTES:
            return b""
        chunk = await self._cache.chunk(publication, 0)
        metrics.WEIGHT_VERSION_SERVED.set(publication.version)
        return chunk or b""

    async def GetWeights(  # type: ignore[override] # written here
        self, request: pb.GetWeightsRequest, context: Context
    ) -> bytes:
        check_number("session", request.session)
        await self._owners.check(request.session, context)
        check_number("version", request.version)
        if request.offset > MAX_WEIGHT_BYTES:
            raise Malformed(f"offset={request.offset}: no weights are larger than {MAX_WEIGHT_BYTES} bytes")
        found = await self._find(request.session, request.version, request.offset)
        if found is None:
            text = f"version={request.version}: neither recent nor pinned; ask for the latest"
            raise Absent(text)
        publication, chunk = found
        reply = pb.GetWeightsReply(publication=publication.to_proto(), offset=request.offset)
        return write_around(reply, pb.GetWeightsReply.CHUNK_FIELD_NUMBER, chunk)

    async def _find(self, session: int, version: int, offset: int) -> tuple[Publication, bytes] | None:
        stored = await self._store.note_fetch(session, version, offset)
        publication = stored
        if publication is None and offset > 0:  # a fetch that has begun ends; none begins without Redis
            publication = self._cache.publication(version)
        if publication is None:
            return None
        chunk = await self._read(publication, offset)
        return None if chunk is None else (publication, chunk)

    async def _read(self, publication: Publication, offset: int) -> bytes | None:
        if offset >= publication.size:
            return b""
        chunk = await self._cache.chunk(publication, offset // WEIGHT_CHUNK_BYTES)
        within = offset % WEIGHT_CHUNK_BYTES
        return chunk[within:] if chunk and within else chunk


def read_watch(request: pb.WatchLatestRequest) -> Watch:
    """Raise Malformed that names the field."""
    check_number("session", request.session)
    for field in (
        "begun_through",
        "known_version",
        "known_begin_through",
        "known_revision",
        "applied_version",
        "flushed",
    ):
        if getattr(request, field) > MAX_NUMBER:
            raise Malformed(f"{field}={getattr(request, field)}: the broker never gave that; at most 2^53")
    if request.wait_ms > MAX_WATCH_WAIT_MS:
        raise Malformed(f"wait_ms={request.wait_ms}: at most {MAX_WATCH_WAIT_MS}")
    if len(request.probe_log_prob) > MAX_PROBE_ANSWERS:
        raise Malformed(f"probe_log_prob: {len(request.probe_log_prob)} answers, at most {MAX_PROBE_ANSWERS}")
    if not _SHA256.fullmatch(request.applied_sha256):
        raise Malformed(f"applied_sha256={request.applied_sha256[:80]!r}: give 64 hexadecimal digits")
    values = {item.name: getattr(request, item.name) for item in fields(Watch)}
    return Watch(**values | {"probe_log_prob": tuple(request.probe_log_prob)})


def write_news(news: News, weights: bytes) -> bytes:
    reply = pb.WatchLatestReply(
        latest=news.latest.to_proto(),
        leave=news.credit.to_proto(),
        state=pb.RunState.ValueType(news.state.value),
        revision=news.revision,
        traffic_revision=news.traffic_revision,
        flush=news.flush,
        scalars=news.scalars,
        evaluate_version=news.evaluate_version,
    )
    return write_around(reply, pb.WatchLatestReply.WEIGHTS_FIELD_NUMBER, weights)


# ---- Versions and traffic for operators: the registry behind ControlService, in threads.

T = TypeVar("T")

_THREADS: Final = 4


class Versions:
    """The registry at `url`, or none where that is empty. policy: what is meant where a call names none."""

    def __init__(self, url: str, policy: str) -> None:
        self.policy = policy
        self._url = url
        self._registry: Registry | None = None
        self._opening = Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="registry")

    async def ask(self, context: Context, work: "Callable[[Registry], T]") -> T:
        """Return what `work` returns; ends the call, or raises Malformed or Absent, where that fails."""
        if not self._url:
            text = (
                "this broker was given no registry: set registry.url to its URL, "
                "or use `penstock policy` where the run's folder lies"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        code, text = grpc.StatusCode.FAILED_PRECONDITION, ""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: work(self._opened())
            )
        except UnknownVersion as error:
            raise Absent(str(error)) from error
        except Unavailable as error:
            code, text = grpc.StatusCode.UNAVAILABLE, str(error)
        except RegistryError as error:
            text = str(error)
        except ImportError as error:
            text = f"{error}; beside this broker: {how_to_install('registry')}"
        except ValueError as error:
            raise Malformed(str(error)) from error
        await context.abort(code, text)
        raise AssertionError  # abort has raised

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._registry is not None:
            self._registry.close()

    def _opened(self) -> "Registry":
        from penstock.registry.registry import Registry  # noqa: PLC0415 - a broker without one needs no SQLAlchemy

        with self._opening:
            if self._registry is None:
                self._registry = Registry.open(self._url)
            return self._registry


# ---- Versions and traffic as ControlService says them.


def version_to_proto(version: PolicyVersion) -> pb_messages.RegisteredVersion:
    evaluation = version.evaluation
    same = "policy version run update sha256 size_bytes configuration standby pinned reason"
    return pb_messages.RegisteredVersion(
        **{name: getattr(version, name) for name in same.split()},
        parent=version.parent or 0,
        evaluation=None if evaluation is None else pb_messages.EvaluationResult(**asdict(evaluation)),
        origin=version.origin.value,
        status=version.status.value,
        created_ms=round(version.created.timestamp() * 1000),
        changed_ms=round(version.changed.timestamp() * 1000),
    )


def traffic_to_proto(traffic: Traffic) -> pb_messages.Traffic:
    return pb_messages.Traffic(
        policy=traffic.policy,
        revision=traffic.revision,
        experiment=traffic.experiment,
        canary_share=traffic.canary_share,
        latest_share=traffic.latest_share,
        shadow=traffic.shadow or 0,
        pins=dict(traffic.pins),
    )


def traffic_from_proto(message: pb_messages.Traffic, policy: str) -> Traffic:
    """Raise Malformed that names the field."""
    try:
        return Traffic(
            policy=message.policy or policy,
            revision=message.revision,
            experiment=message.experiment or "default",
            canary_share=message.canary_share,
            latest_share=message.latest_share,
            shadow=message.shadow or None,
            pins=dict(message.pins),
        )
    except ValueError as error:
        raise Malformed(f"traffic: {error}") from error
