"""The policy server beside a bare gRPC echo of the same message sizes, which is the limit; in turn, medians.

Both are grpc.aio in one process; the client is another process, with so many calls in flight. `cpu` is what
the server's process spends on a call, which other work on the machine disturbs less than the clock. Learning:
every step belongs to an episode, carries the reward of the one before, and goes to a learner's log (its own
broker and Redis). Starts: servers of a network that torch runs, which keep `actor.threads`.

    python -m benchmarks.serving load             a client; reads words of `measure` line by line
    python -m benchmarks.serving echo ADDRESS     grpc.aio: each message is answered with the same ActReply
"""

import asyncio
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.path import RUN, Shape, fetch
from benchmarks.stand import PREFIX, Ask, Cell, Options, Table, client, cpu_seconds, processes, services
from penstock.broker.log.learner_log import LearnerLog
from penstock.config.settings import ActorSection, PolicySection
from penstock.launch.run.supervisor import penstock
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import to_tensor
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.v1 import policy_pb2 as pb
from penstock.v1 import refusal_pb2
from penstock.v1.policy_pb2_grpc import PolicyServiceStub

ME: Final = (sys.executable, "-m", "benchmarks.serving")
SECONDS: Final = 1.2
WARM_S: Final = 0.5
ROWS: Final = 64
EPISODE_STEPS: Final = 200
SHAPE: Final = Shape(Box(np.full(4, -np.inf, np.float32), np.full(4, np.inf, np.float32)), 32, 1)
REPLY: Final = pb.ActReply(
    action=[pb.Part(value=to_tensor(np.array(1)))], log_prob=[-0.7], version=1, arm=pb.ARM_ACTIVE
).SerializeToString()
"""The policy server's reply to a single observation."""
_ACT: Final = "/penstock.v1.PolicyService/Act"
_ECHO: Final = "bench.Echo"
_REFUSED: Final = pb.ActReply(refusal=refusal_pb2.Refusal()).SerializeToString()[:1]
"""How a reply begins that holds a refusal, its first field."""


Places = dict[str, tuple[str, int]]
"""Address and pid, by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kind of request, and the load it is compared with: both a server and a word of `measure`."""

    name: str
    what: tuple[str, str]
    limit: tuple[str, str]
    in_flight: int
    streams: int = 1
    rows: int = 1


ACT: Final = ("server", "act")
MANY: Final = ("server", "act-rows")
LEARN: Final = ("learning", "learn")
STREAM: Final = ("server", "act-stream")
STARTS: Final = ("start-1", "start-2", "start-3")
ECHO: Final = ("echo", "echo")
ECHO_STREAM: Final = ("echo", "echo-stream")
FORWARD: Final = ("echo", "echo-forward")
LOADS: Final = (
    Load(name="echo with a forward pass, 1 client", what=FORWARD, limit=ECHO, in_flight=1),
    Load(name="Act, 1 client", what=ACT, limit=ECHO, in_flight=1),
    Load(name="Act, 16 in flight", what=ACT, limit=ECHO, in_flight=16),
    Load(name="Act, 64 in flight", what=ACT, limit=ECHO, in_flight=64),
    Load(name="Act of 64 rows, 1 client ÷ Act", what=MANY, limit=ACT, in_flight=1, rows=ROWS),
    *(Load(name=f"Act, by torch, {start}", what=(start, "act"), limit=ECHO, in_flight=1) for start in STARTS),
    Load(name="stream, 1 in flight", what=STREAM, limit=ECHO_STREAM, in_flight=1),
    Load(name="stream, 64 in flight", what=STREAM, limit=ECHO_STREAM, in_flight=64),
    Load(name="16 streams, 64 in flight", what=STREAM, limit=ECHO_STREAM, in_flight=64, streams=16),
    Load(name="episodes with rewards, 1 client ÷ Act", what=LEARN, limit=ACT, in_flight=1),
    Load(name="episodes with rewards, 64 ÷ Act", what=LEARN, limit=ACT, in_flight=64),
)


# ---- tables


def table(options: Options) -> Table:
    """Return calls per second and latencies, and both as parts of the echo's in the same minute."""
    with servers() as addresses, client(*ME, "load") as ask:
        rows = [_row(ask, load, addresses, options.repeat) for load in LOADS]
    return Table(
        title="Policy server beside a bare grpc.aio echo (64-64 policy, unix socket)",
        columns=(
            *("", "per s", "p50 ms", "p99 ms", "cpu µs"),
            *("limit per s", "limit p50 ms", "rate ÷ limit", "p50 − limit ms"),
        ),
        rows=rows,
        note="the limit is the echo, or what stands behind ÷; per s and rate ÷ limit count observations",
    )


def _row(ask: Ask, load: Load, there: Places, repeat: int) -> list[Cell]:
    both = (load.what, load.limit)
    rounds = [[_measured(ask, what, load, there) for what in both] for _ in range(repeat)]
    mine, limit = ({key: median(one[side][key] for one in rounds) for key in rounds[0][0]} for side in (0, 1))
    ratio = median(ours["rate"] / other["rate"] for ours, other in rounds)
    return [
        *(load.name, mine["rate"] * load.rows, mine["p50_ms"], mine["p99_ms"], mine["cpu_us"]),
        *(limit["rate"], limit["p50_ms"], ratio * load.rows, mine["p50_ms"] - limit["p50_ms"]),
    ]


def _measured(ask: Ask, whom: tuple[str, str], load: Load, there: Places) -> dict[str, float]:
    (address, pid), what = there[whom[0]], whom[1]
    before = cpu_seconds(pid)
    figures = ask(what, address, load.in_flight, load.streams)
    return figures | {"cpu_us": 1e6 * (cpu_seconds(pid) - before) / figures["calls"]}


def peers_table(options: Options) -> Table:
    """Return answers by gRPC, and those of FastAPI before a Stable-Baselines3 policy by HTTP, in turn."""
    from benchmarks import peers

    with servers() as ours, peers.fastapi() as theirs, client(*ME, "load") as ask:
        rows = [
            _beside(ask, clients, ours["server"][0], theirs[0], options.repeat) for clients in (1, 16, 64)
        ]
    return Table(
        title="One observation a request: Act beside FastAPI + uvicorn + Stable-Baselines3",
        columns=(
            *("clients", "per s", "p50 ms", "p99 ms"),
            *("FastAPI per s", "FastAPI p50 ms", "FastAPI p99 ms", "ours ÷ theirs"),
        ),
        rows=rows,
        note="64-64 policy of CartPole's shapes; one process each",
    )


def _beside(ask: Ask, clients: int, ours: str, theirs: str, repeat: int) -> list[Cell]:
    rounds = [(ask("act", ours, clients, 1), ask("http", theirs, clients, 1)) for _ in range(repeat)]
    names = ("rate", "p50_ms", "p99_ms")
    figures = [median(pair[side][name] for pair in rounds) for side in (0, 1) for name in names]
    return [clients, *figures, median(mine["rate"] / other["rate"] for mine, other in rounds)]


# ---- servers


SMALL: Final = PolicySection()
BY_TORCH: Final = PolicySection(hidden_sizes=(1024,) * 6, hidden_norm="batch")


def make_policy(section: PolicySection = SMALL) -> Any:
    """Return a policy of CartPole's shapes; 64-64 unless `section` says otherwise."""
    from penstock.policy.policy import build as build_policy

    return build_policy(SHAPE.box, Discrete(2), section, 1)


def specification(section: PolicySection = SMALL) -> RunSpecification:
    """Return the specification that a learner would send to the policy server."""
    from penstock.learner.probe import make_probe

    return replace(
        SHAPE.specification(),
        policy_json=section.canonical_json(),
        actor_json=ActorSection().canonical_json(),
        probe=make_probe(SHAPE.box, make_policy(section), 0),
    )


def make_run(folder: Path, section: PolicySection = SMALL) -> None:
    """Make a run's folder with one version, active."""
    from penstock.learner.publish.kept_versions import write_specification
    from penstock.policy.weights import encode
    from penstock.registry.records import NewVersion, Origin
    from penstock.registry.registry import Registry
    from penstock.registry.weight_files import registry_url, write_kept

    (folder / "policies").mkdir(parents=True)
    write_specification(folder, specification(section))
    blob = encode(make_policy(section))
    write_kept(folder, 1, blob)
    with Registry.open(registry_url(folder), migrate=True) as registry:
        new = NewVersion(
            policy="default", version=1, run=RUN, update=1, sha256=hashlib.sha256(blob).hexdigest(),
            size_bytes=len(blob), origin=Origin.FINAL,
        )  # fmt: skip
        registry.register(new, by="bench")
        registry.promote("default", 1, "for the benchmark", by="bench")


@contextmanager
def servers() -> Iterator[Places]:
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as name,
        services(durability="fsync_1s") as here,
        _learner(here.redis_url),
    ):
        root = Path(name)
        make_run(root / "run")
        make_run(root / "by-torch", BY_TORCH)
        words = {"server": ("--run", str(root / "run")), "learning": ("--broker", here.broker)}
        words |= dict.fromkeys(STARTS, ("--run", str(root / "by-torch")))
        addresses = {role: f"unix:{root}/{role}.sock" for role in ("echo", *words)}
        commands: dict[str, Sequence[str]] = {"echo": (*ME, "echo", addresses["echo"])}
        for role, said in words.items():
            commands[role] = penstock("serve", *said, "--listen", addresses[role])
        with processes(root, commands) as pids:
            yield {role: (address, pids[role]) for role, address in addresses.items()}


@contextmanager
def _learner(redis_url: str) -> Iterator[None]:
    """A run that takes all experience and learns nothing; its weights are those of the other servers."""
    from penstock.policy.weights import encode

    log, stop = LearnerLog.connect(redis_url, wait_s=10.0), threading.Event()
    log.acquire(RUN, "bench", 600_000)
    log.start(specification().encode(), SHAPE.pacing(100_000))
    log.publish(encode(make_policy()), update=1, settled=0, scalars={})

    def read() -> None:
        position = 0
        while not stop.is_set():
            if entries := log.read(position, 256, 50):
                position = entries[-1].number
                fetch(log, entries)
                log.settle(position)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        log.release()
        log.close()


async def _echo(address: str) -> None:
    """Serve until killed: bare, with a forward pass and a draw for each message, and as a stream."""
    from penstock.actor.serving.server_process import STREAMS_PER_CONNECTION
    from penstock.config.settings import BrokerSection
    from penstock.runtime.health import Health, announce, serve_http
    from penstock.runtime.server_frame import Front

    policy, observation = make_policy(), {"observation": np.zeros((1, 4), np.float32)}

    async def unary(_request: bytes, _context: Any) -> bytes:
        return REPLY

    async def forward(_request: bytes, _context: Any) -> bytes:
        policy.act(observation)
        return REPLY

    async def stream(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield REPLY

    front = Front((), BrokerSection(), streams_per_connection=STREAMS_PER_CONNECTION)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Forward": grpc.unary_unary_rpc_method_handler(forward),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    front.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_ECHO, handlers),))
    front.server.add_insecure_port(address)
    await front.server.start()
    health = Health("echo")
    health.set_ready(True)
    announce("echo", metrics_port=serve_http(health, "127.0.0.1", 0)[1], address=address)
    await front.server.wait_for_termination()


# ---- the client

Call = Callable[[], Awaitable[None]]


def _request(rows: int) -> pb.ActRequest:
    """Return CartPole's observation, so many of them; 0: a single one."""
    values = np.linspace(-0.1, 0.1, max(rows, 1) * 4, dtype=np.float32)
    part = pb.Part(value=to_tensor(values.reshape(rows, 4) if rows else values))
    return pb.ActRequest(observation=[part], batch=rows)


def check_answered(reply: bytes) -> None:
    """Raise RuntimeError for the bytes of a refusal."""
    if reply.startswith(_REFUSED):
        raise RuntimeError(f"refused: {pb.ActReply.FromString(reply).refusal}")


async def _unary(channel: Any, method: str, rows: int) -> Call:
    """Return a call of Act, or of an echo; nothing is parsed on this side."""
    ask, data = channel.unary_unary(method), _request(rows).SerializeToString()

    async def call() -> None:
        check_answered(await ask(data))

    return call


async def _learning(channel: Any) -> Call:
    """Return a call of the next step of an episode of its own, with the reward of the one before."""
    stub: Any = PolicyServiceStub(channel)
    ask = channel.unary_unary(_ACT)
    request, data, left = _request(0), b"", 0

    async def begin_again() -> None:
        if request.episode_id:
            name, how = request.episode_id, pb.ENDING_TERMINATED
            ended = await stub.EndEpisode(pb.EndEpisodeRequest(episode_id=name, ending=how, reward=1.0))
            check_answered(ended.SerializeToString())
        started = await stub.StartEpisode(pb.StartEpisodeRequest())
        check_answered(started.SerializeToString())
        request.episode_id = started.episode_id
        request.ClearField("reward")

    async def call() -> None:
        nonlocal data, left
        if left == 0:
            await begin_again()
            data, left = request.SerializeToString(), EPISODE_STEPS
        check_answered(await ask(data))
        if not request.HasField("reward"):
            request.reward = 1.0
            data = request.SerializeToString()
        left -= 1

    return call


async def posting(address: str, route: str, body: bytes) -> Call:
    """Return a call that posts JSON over a connection that stays open; the answer is not parsed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {route} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def call() -> None:
        writer.write(data)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {answer!r}")
        length = answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))

    return call


async def _streaming(channel: Any, method: str, in_flight: int, until_s: float) -> list[float]:
    """Keep so many requests under way on one stream; return latencies by place in line, without the first."""
    data, began, latencies = _request(0).SerializeToString(), list[float](), list[float]()
    call = channel.stream_stream(method)()
    try:
        for _ in range(in_flight):
            began.append(time.perf_counter())
            await call.write(data)
        while time.perf_counter() < until_s:
            check_answered(await call.read())
            latencies.append(time.perf_counter() - began[len(latencies)])
            began.append(time.perf_counter())
            await call.write(data)
    finally:
        call.cancel()
    return latencies[len(latencies) // 8 :]


async def measure(what: str, address: str, in_flight: int, streams: int) -> dict[str, float]:
    """Return figures of a word: echo, echo-forward, echo-stream, act, act-stream, act-rows, learn, http."""
    if what == "http":
        body = json.dumps({"observation": [-0.1, -0.03, 0.03, 0.1]}).encode()
        return await repeated([await posting(address, "/act", body) for _ in range(in_flight)], SECONDS)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        if what.endswith("-stream"):
            until_s = time.perf_counter() + WARM_S + SECONDS
            method = f"/{_ECHO}/Stream" if what == "echo-stream" else f"{_ACT}Stream"
            each = [max(1, in_flight // streams)] * min(streams, in_flight)
            parts = await asyncio.gather(*(_streaming(channel, method, one, until_s) for one in each))
            timed = [latency for part in parts for latency in part]
            # Seven eighths of the calls are timed, over all of the time.
            return summary(timed, (WARM_S + SECONDS) * 7 / 8, len(timed) * 8 / 7)
        makers: dict[str, Callable[[], Awaitable[Call]]] = {
            "act": lambda: _unary(channel, _ACT, 0),
            "act-rows": lambda: _unary(channel, _ACT, ROWS),
            "echo": lambda: _unary(channel, f"/{_ECHO}/Unary", 0),
            "echo-forward": lambda: _unary(channel, f"/{_ECHO}/Forward", 0),
            "learn": lambda: _learning(channel),
        }
        return await repeated([await makers[what]() for _ in range(in_flight)], SECONDS)


async def repeated(calls: Sequence[Call], seconds: float) -> dict[str, float]:
    """Return figures of calls that are made over and over at the same time, behind a warm-up."""

    async def keep_calling(call: Call, until_s: float, latencies: list[float]) -> None:
        while (began := time.perf_counter()) < until_s:
            await call()
            latencies.append(time.perf_counter() - began)

    warm, timed = list[float](), list[float]()
    for latencies, duration_s in ((warm, WARM_S), (timed, seconds)):
        until_s = time.perf_counter() + duration_s
        await asyncio.gather(*(keep_calling(call, until_s, latencies) for call in calls))
    return summary(timed, seconds, len(warm) + len(timed))


def summary(latencies: Sequence[float], seconds: float, calls: float) -> dict[str, float]:
    """Return calls in all, and of the timed ones rate per second, p50_ms and p99_ms."""
    p50_ms, p99_ms = np.quantile(latencies, (0.5, 0.99)) * 1e3
    return {
        "calls": calls,
        "rate": len(latencies) / seconds,
        "p50_ms": float(p50_ms),
        "p99_ms": float(p99_ms),
    }


def answer_lines(measure: Callable[..., Awaitable[dict[str, float]]]) -> None:
    """Measure once for each line of words: what, address, and numbers."""
    with asyncio.Runner() as runner:
        for what, address, *numbers in map(str.split, sys.stdin):
            run: Callable[[Awaitable[dict[str, float]]], dict[str, float]] = runner.run  # type: ignore[assignment]
            print(json.dumps(run(measure(what, address, *map(int, numbers)))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        asyncio.run(_echo(sys.argv[2]))
    else:
        answer_lines(measure)
