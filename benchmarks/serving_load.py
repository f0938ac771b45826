"""Clients of a server, as many calls in flight as wanted, in one process: latencies and a rate.

    python -m benchmarks.serving_load WHAT ADDRESS --in-flight 64 --streams 1 --seconds 3

Prints one line of JSON; without arguments one for each line of them that it reads. WHAT: echo, echo-forward,
echo-stream, act, act-stream, act-rows (64 observations in a call), learn (episodes whose steps carry
rewards), http (POST /act with JSON, a connection for each in flight).
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import numpy as np

from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.v1 import policy_pb2 as pb
from penstock.v1 import refusal_pb2, tensor_pb2
from penstock.v1.policy_pb2_grpc import PolicyServiceStub

ACT: Final = "/penstock.v1.PolicyService/Act"
ECHO: Final = "bench.Echo"
"""The service that answers with what it was sent."""
ROWS: Final = 64
EPISODE_STEPS: Final = 200
_WARM_S: Final = 0.5
_REFUSED: Final = pb.ActReply(refusal=refusal_pb2.Refusal()).SerializeToString()[:1]
"""How a reply begins that holds a refusal, its first field."""

Call = Callable[[], Awaitable[None]]


def request_of(rows: int) -> pb.ActRequest:
    """CartPole's observation, so many of them; 0: a single one."""
    values = np.linspace(-0.1, 0.1, max(rows, 1) * 4, dtype=np.float32)
    shape = (rows, 4) if rows else (4,)
    tensor = tensor_pb2.Tensor(dtype="float32", shape=shape, data=values.tobytes())
    return pb.ActRequest(observation=[pb.Part(value=tensor)], batch=rows)


async def call_unary(channel: Any, method: str, rows: int) -> Call:
    """Act, or an echo that answers with the same bytes; nothing is parsed on this side."""
    ask = channel.unary_unary(method)
    data = request_of(rows).SerializeToString()

    async def call() -> None:
        check_answered(await ask(data))

    return call


def check_answered(reply: bytes) -> None:
    """Raise RuntimeError for the bytes of a refusal."""
    if reply.startswith(_REFUSED):
        raise RuntimeError(f"refused: {pb.ActReply.FromString(reply).refusal}")


async def call_learn(channel: Any) -> Call:
    """The next step of an episode of this caller's own, with the reward of the one before."""
    stub: Any = PolicyServiceStub(channel)
    ask = channel.unary_unary(ACT)
    request, data, left = request_of(0), b"", 0

    async def call() -> None:
        nonlocal data, left
        if left == 0:
            await _begin_again(stub, request)
            request.ClearField("reward")
            data, left = request.SerializeToString(), EPISODE_STEPS
        check_answered(await ask(data))
        if not request.HasField("reward"):
            request.reward = 1.0
            data = request.SerializeToString()
        left -= 1

    return call


async def _begin_again(stub: Any, request: pb.ActRequest) -> None:
    """End the episode of `request`, if it has one, and give it the next."""
    if request.episode_id:
        ended = pb.EndEpisodeRequest(episode_id=request.episode_id, ending=pb.ENDING_TERMINATED, reward=1.0)
        check_answered((await stub.EndEpisode(ended)).SerializeToString())
    started = await stub.StartEpisode(pb.StartEpisodeRequest())
    check_answered(started.SerializeToString())
    request.episode_id = started.episode_id


async def call_http(address: str) -> Call:
    """Return a call that sends the same observation as JSON, over a connection that stays open."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"observation": [-0.1, -0.03, 0.03, 0.1]})
    head = f"POST /act HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    async def call() -> None:
        writer.write(data)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {answer!r}")
        length = answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))

    return call


async def keep_calling(call: Call, until_s: float, latencies: list[float]) -> None:
    """One call after the other."""
    while time.perf_counter() < until_s:
        began = time.perf_counter()
        await call()
        latencies.append(time.perf_counter() - began)


async def stream(channel: Any, method: str, in_flight: int, until_s: float) -> list[float]:
    """So many requests under way on one stream; replies come in any order, latencies by place in line."""
    data, began, latencies = request_of(0).SerializeToString(), list[float](), list[float]()
    call = channel.stream_stream(method)()
    try:
        for _ in range(in_flight):
            began.append(time.perf_counter())
            await call.write(data)
        answered = 0
        while time.perf_counter() < until_s:
            check_answered(await call.read())
            latencies.append(time.perf_counter() - began[answered])
            answered += 1
            began.append(time.perf_counter())
            await call.write(data)
    finally:
        call.cancel()
    return latencies


async def measure(what: str, address: str, in_flight: int, streams: int, seconds: float) -> list[float]:
    """Latencies in seconds of what was answered after the warm-up."""
    if what == "http":
        return await repeat([await call_http(address) for _ in range(in_flight)], seconds)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        if what.endswith("-stream"):
            until_s = time.perf_counter() + _WARM_S + seconds
            method = f"/{ECHO}/Stream" if what == "echo-stream" else f"{ACT}Stream"
            each = max(1, in_flight // streams)
            parts = await asyncio.gather(
                *(stream(channel, method, each, until_s) for _ in range(min(streams, in_flight)))
            )
            return [latency for part in parts for latency in part[len(part) // 8 :]]
        makers: dict[str, Callable[[], Awaitable[Call]]] = {
            "act": lambda: call_unary(channel, ACT, 0),
            "act-rows": lambda: call_unary(channel, ACT, ROWS),
            "echo": lambda: call_unary(channel, f"/{ECHO}/Unary", 0),
            "echo-forward": lambda: call_unary(channel, f"/{ECHO}/Forward", 0),
            "learn": lambda: call_learn(channel),
        }
        return await repeat([await makers[what]() for _ in range(in_flight)], seconds)


async def repeat(calls: Sequence[Call], seconds: float) -> list[float]:
    """Each over and over beside the others, first for the warm-up; latencies in seconds."""
    await asyncio.gather(*(keep_calling(call, time.perf_counter() + _WARM_S, []) for call in calls))
    latencies: list[float] = []
    until_s = time.perf_counter() + seconds
    await asyncio.gather(*(keep_calling(call, until_s, latencies) for call in calls))
    return latencies


def summary(latencies: Sequence[float], seconds: float, share: float = 1) -> dict[str, float]:
    """Return calls, rate per second, p50_ms and p99_ms; share: of the calls that was timed."""
    ordered = np.sort(latencies)
    return {
        "calls": round(len(latencies) / share * (seconds + _WARM_S * (share == 1)) / seconds),
        "rate": len(latencies) / seconds / share,
        "p50_ms": float(np.quantile(ordered, 0.5)) * 1e3,
        "p99_ms": float(np.quantile(ordered, 0.99)) * 1e3,
    }


def ask(runner: asyncio.Runner, arguments: Sequence[str]) -> dict[str, float]:
    """Measure once: calls, rate per second, p50_ms, p99_ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_load")
    parser.add_argument("what")
    parser.add_argument("address")
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    said = parser.parse_args(arguments)
    latencies = runner.run(measure(said.what, said.address, said.in_flight, said.streams, said.seconds))
    window = said.seconds + _WARM_S if said.what.endswith("-stream") else said.seconds
    return summary(latencies, window, 7 / 8 if said.what.endswith("-stream") else 1)


def main() -> None:
    """Measure and print; without arguments once for each line of them that comes."""
    with asyncio.Runner() as runner:
        for arguments in [sys.argv[1:]] if len(sys.argv) > 1 else map(str.split, sys.stdin):
            print(json.dumps(ask(runner, arguments)), flush=True)


if __name__ == "__main__":
    main()
