"""WeightService: newest weights, credit to generate and run state on their way down.

WatchLatest looks, and holds the call until there is something that the caller does not know, its wait
is over or the broker drains. While Redis does not answer it says NOT_READY and never fails. Of weights that
do not fit into its reply it names the version that the session is to fetch, whose bytes stay until it has
them.
"""

import asyncio
import re
from dataclasses import replace
from typing import Any

from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.call_rules import check_number, redis_down
from penstock.broker.service.changes import Changes
from penstock.broker.service.last_credit import LastCredit
from penstock.broker.service.session_owners import SessionOwners
from penstock.broker.service.weight_cache import WeightCache
from penstock.protocol.limits import (
    MAX_NUMBER,
    MAX_PROBE_ANSWERS,
    MAX_WATCH_WAIT_MS,
    MAX_WEIGHT_BYTES,
    WEIGHT_CHUNK_BYTES,
)
from penstock.protocol.messages import News, Publication, Watch
from penstock.protocol.rawproto import write_around
from penstock.protocol.refusal import Reason, Refusal
from penstock.rpc.boundary import Absent, Malformed
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint
from penstock.v1 import weights_pb2 as pb
from penstock.v1.weights_pb2_grpc import WeightServiceServicer

_SHA256 = re.compile(r"[0-9a-f]{64}|")

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


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

    async def WatchLatest(  # type: ignore[override]  # noqa: N802 - written here
        self, request: pb.WatchLatestRequest, context: Context
    ) -> bytes:
        """See weights.proto."""
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
        if isinstance(outcome, News) and _is_to_be_fetched(outcome.latest, watch.known_version):
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

    async def GetWeights(  # type: ignore[override]  # noqa: N802 - written here
        self, request: pb.GetWeightsRequest, context: Context
    ) -> bytes:
        """See weights.proto."""
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


def _is_to_be_fetched(publication: Publication, known_version: int) -> bool:
    """Return whether the caller lacks it and it is too large to come with the reply."""
    return publication.version > known_version and publication.size > WEIGHT_CHUNK_BYTES


def read_watch(request: pb.WatchLatestRequest) -> Watch:
    """The watch of a message; raises Malformed that names the field."""
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
    return Watch(
        session=request.session,
        begun_through=request.begun_through,
        known_version=request.known_version,
        known_begin_through=request.known_begin_through,
        known_revision=request.known_revision,
        applied_version=request.applied_version,
        applied_sha256=request.applied_sha256,
        probe_log_prob=tuple(request.probe_log_prob),
        wait_ms=request.wait_ms,
        gives_back=request.gives_back,
        flushed=request.flushed,
    )


def write_news(news: News, weights: bytes) -> bytes:
    """The bytes of a WatchLatestReply."""
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
