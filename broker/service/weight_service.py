"""WeightService: newest weights, credit to generate and run state on their way down.

WatchLatest holds the call until there is news for its caller, its wait is over or the broker drains. While
Redis does not answer, the reply is the refusal NOT_READY, never an error. For weights that do not fit into
the reply it names the version that the session is to fetch; the bytes of that version stay until it has
them.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from typing import Final

from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.sessions import (
    Changes,
    LastCredit,
    SessionOwners,
    check_number,
    counted,
    redis_down,
)
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
from penstock.rpc.gate import Absent, Context, Malformed
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint
from penstock.v1 import weights_pb2 as pb
from penstock.v1.weights_pb2_grpc import WeightServiceServicer

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
        """By version; the one with the oldest request comes first."""

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
        """last_credit: the sequence through which the last Append reply allowed a session to begin."""
        self._store, self._cache, self._changes, self._owners = store, cache, changes, owners
        self._last_credit, self._last_evaluations = last_credit, LastCredit()

    def forget(self) -> None:
        """Forget requested evaluations: the sessions of another incarnation of the run have had none."""
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
            return pb.WatchLatestReply(refusal=counted(watched)).SerializeToString()
        # A reply that gets lost costs one wait: the next call gets the number again when its wait ends.
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
        assert outcome is not None, "a reply of the store is news or a refusal"
        # Weights that the caller lacks and that are too large for the reply.
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
