"""The reward service: one reward model behind gRPC, in a process that may have its own GPU.

It is stateless. A bad request is refused in the reply, which names the sample; a full queue is refused as
OVERLOADED with a time to try again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import grpc
import torch

from penstock.config.settings import Settings
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.rpc.auth import ACTOR, CLIENT, Calls
from penstock.rpc.gate import Boundary, CallRule
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputePool, run_loop
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.health import Health, serve_http
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.metrics import EVENT_LOOP, LATENCY_S, declare, watch_loop
from penstock.runtime.server_frame import ServerFrame, setter
from penstock.v1 import reward_pb2 as pb
from penstock.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from penstock.workloads.language.reward.reward_model import HeadsModel, RewardModel, load_model
from penstock.workloads.language.reward.reward_source import (
    MAX_REWARD_SAMPLES,
    BadReward,
    model_to_proto,
    read_score_request,
    reply_to_proto,
    sample_from_proto,
)

# ---- Metrics of the reward service.

ROLE: Final = "reward"
"""Role of the process, under which its metrics are served."""

_families = declare(ROLE)
REWARDS = _families.counter("rewards", "Responses that were scored")
REWARD_VALUE = _families.summary("reward_value", "Scores, as the reward model gives them")
REWARD_BATCH_ROWS = _families.histogram(
    "reward_batch_rows", "Responses that were scored together", (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
)
REWARD_PASS_SECONDS = _families.histogram(
    "reward_pass_seconds", "How long it took to score such a batch", LATENCY_S
)


# ---- Rows of calls that come at the same time are scored together.

log = logging.getLogger(__name__)

MAX_WAITING_ROWS: Final = 8192
"""Rows that may wait; further calls are refused as OVERLOADED."""
RETRY_MS: Final = 200

T = TypeVar("T")
Rows = Sequence[Sequence[int]]
Scores = tuple[float | None, ...]


_Waiting = tuple[Rows, "asyncio.Future[Scores]"]


class Batcher:
    """Scores the rows of concurrent calls together, in one thread."""

    def __init__(
        self,
        score: Callable[[Rows], Scores],
        *,
        max_rows: int,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._score, self._max_rows = score, max_rows
        self._on_begin, self._on_end = on_begin, on_end
        self._loop = asyncio.get_running_loop()
        self._thread = ComputePool(1, "scoring")
        self._waiting: deque[_Waiting] = deque()
        self._rows = 0
        self._is_busy = False

    async def ask(self, rows: Rows) -> Scores:
        """Return the scores of rows in their order; raises Refused (OVERLOADED), and errors of scoring."""
        if self._rows and self._rows + len(rows) > MAX_WAITING_ROWS:
            text = f"{self._rows} samples wait; send it again"
            raise Refused(Refusal(reason=Reason.OVERLOADED, detail=text, retry_after_ms=RETRY_MS))
        future: asyncio.Future[Scores] = self._loop.create_future()
        self._waiting.append((rows, future))
        self._rows += len(rows)
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._pass)
        return await future

    async def alone(self, work: Callable[[], T]) -> T:
        """Return the result of other work, which is done between two passes."""
        return await self._loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown()

    def _pass(self) -> None:
        batch = self._take()
        if not batch:
            self._is_busy = False
            return
        self._on_begin()
        rows = [row for asked, _ in batch for row in asked]
        running = self._loop.run_in_executor(self._thread, self._timed, rows)
        running.add_done_callback(lambda done: self._passed(batch, done))

    def _take(self) -> list[_Waiting]:
        """Return the next calls that fit in one pass and still have a caller; a larger call alone."""
        batch: list[_Waiting] = []
        taken = 0
        while self._waiting and (not batch or taken + len(self._waiting[0][0]) <= self._max_rows):
            rows, future = self._waiting.popleft()
            self._rows -= len(rows)
            if not future.done():
                batch.append((rows, future))
                taken += len(rows)
        return batch

    def _timed(self, rows: Rows) -> Scores:
        began = time.perf_counter()
        scores = self._score(rows)
        REWARD_PASS_SECONDS.observe(time.perf_counter() - began)
        REWARD_BATCH_ROWS.observe(len(rows))
        REWARDS.inc(len(rows))
        for score in scores:
            if score is not None:
                REWARD_VALUE.observe(score)
        return scores

    def _passed(self, batch: Sequence[_Waiting], done: "asyncio.Future[Scores]") -> None:
        """Hand out the scores; the error of a pass goes to each of its callers."""
        self._on_end()
        error = done.exception()
        at = 0
        for rows, future in batch:
            if not future.done():
                if error is None:
                    future.set_result(done.result()[at : at + len(rows)])
                else:
                    future.set_exception(error)
            at += len(rows)
        self._pass()


NAME: Final = "penstock.v1.RewardService"
CALLS: Final[Calls] = {
    f"/{NAME}/Score": ACTOR,
    f"/{NAME}/DescribeModel": ACTOR,
    f"/{NAME}/Judge": ACTOR | CLIENT,
}
"""Which party may call what."""
SCORING: Final = "scoring"
STALL_S: Final = 120.0
"""Seconds after which a batch counts as stalled."""
MAX_BATCH_ROWS: Final = 256
DRAIN_GRACE_S: Final = 10.0
RULES: Final = {name: CallRule(parse=read_score_request) for name in ("Score", "Judge")}

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


class RewardService:
    """The calls of reward.proto. Used by one event loop."""

    def __init__(self, model: RewardModel, batcher: Batcher) -> None:
        self._model, self._batcher = model, batcher
        # Text takes long to tokenise, and a tokenizer may be used by one thread at a time.
        self._encoding = ComputePool(1, "encoding")
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        self._encoding.shutdown()

    def add_to(self, server: "grpc.aio.Server") -> None:
        methods: Any = SimpleNamespace(Score=self.score, Judge=self.judge, DescribeModel=self.describe)
        add_RewardServiceServicer_to_server(methods, server)

    async def score(self, request: pb.ScoreRequest, _context: Context) -> pb.ScoreReply:
        try:
            scores = await self._batcher.ask(await self._encoded(request))
        except (BadReward, Refused) as error:
            return pb.ScoreReply(refusal=_refused(error))
        return reply_to_proto(scores, self._model.by)

    async def judge(self, request: pb.ScoreRequest, _context: Context) -> pb.JudgeReply:
        model = self._model
        try:
            if not isinstance(model, HeadsModel):
                raise invalid(
                    "this model has one head: train one with `penstock rlhf reward train --head NAME=SCALE`"
                )
            rows = await self._encoded(request)
            found = await self._batcher.alone(lambda: model.judge_rows(rows))
        except (BadReward, Refused) as error:
            return pb.JudgeReply(refusal=_refused(error))
        judged = [pb.JudgedResponse(shares=one.shares, reward=one.reward) for one in found]
        return pb.JudgeReply(judgements=judged, model=model_to_proto(model.by))

    async def describe(self, _request: pb.DescribeModelRequest, _context: Context) -> pb.DescribeModelReply:
        return pb.DescribeModelReply(
            model=model_to_proto(self._model.by),
            max_samples=MAX_REWARD_SAMPLES,
            max_tokens=self._model.encoder.max_tokens,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )

    async def _encoded(self, request: pb.ScoreRequest) -> list[list[int]]:
        return await self._loop.run_in_executor(self._encoding, self._rows, request)

    def _rows(self, request: pb.ScoreRequest) -> list[list[int]]:
        """Return the token ids of each sample; raises Refused, which names the first bad sample."""
        if not request.samples:
            raise invalid("samples: give at least one")
        rows = []
        for index, message in enumerate(request.samples):
            try:
                rows.append(self._model.encode(sample_from_proto(message)))
            except ValueError as error:
                raise invalid(f"samples[{index}]: {error}") from error
        return rows


def _refused(error: BadReward | Refused) -> Any:
    refusal = (error if isinstance(error, Refused) else invalid(str(error))).refusal
    metrics.REFUSALS.labels(refusal.reason.label).inc()
    return refusal.to_proto()


def main(
    lifecycle: Lifecycle, settings: Settings, *, folder: Path, base: str | None, device: str, listen: str
) -> int:
    torch.set_num_threads(settings.actor.threads)
    health = Health(ROLE)
    model = load_model(folder, base=base, device=device)
    log.info("model loaded", extra={"model": model.by.name, "sha256": model.by.sha256, "device": device})
    return run_loop(_serve(lifecycle, settings, health, model, listen))


async def _serve(
    lifecycle: Lifecycle, settings: Settings, health: Health, model: RewardModel, listen: str
) -> int:
    stop = asyncio.Event()
    lifecycle.on_drain(setter(stop))
    boundary = Boundary(rules=RULES, on_malformed=metrics.REFUSALS.labels("malformed").inc)
    frame = ServerFrame(ROLE, (NAME,), settings, listen, boundary=boundary, calls=CALLS)
    batcher = Batcher(
        model.score_rows,
        max_rows=MAX_BATCH_ROWS,
        on_begin=lambda: health.expect(SCORING, "a batch is being scored"),
        on_end=lambda: _rest(health),
    )
    service = RewardService(model, batcher)
    service.add_to(frame.server)
    watching = asyncio.create_task(watch_loop(partial(health.progress, EVENT_LOOP)))
    health.watch(EVENT_LOOP, settings.broker.stall_timeout_s)
    health.watch(SCORING, STALL_S)
    health.suspend(SCORING)
    try:
        _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
        address = frame.bind()
        await frame.begin(metrics_port=metrics_port)
        health.set_ready(True)
        log.info("serving", extra={"address": address})
        await stop.wait()
        health.set_ready(False, "draining")
        await frame.drain(DRAIN_GRACE_S)
    finally:
        watching.cancel()
        await frame.close()
        service.close()
        batcher.close()
    return EXIT_OK


def _rest(health: Health) -> None:
    """Stop watching for a stall: the next batch may come much later."""
    health.progress(SCORING)
    health.suspend(SCORING)
