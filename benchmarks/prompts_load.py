"""Clients that ask for mutations, in a process of their own; as `benchmarks.serving_load`, which it uses.

    python -m benchmarks.prompts_load WHAT ADDRESS --in-flight 16 --seconds 3

WHAT: numbers (POST /select_action, the embedding as 1,536 numbers of JSON), base64 (as base64 of float32),
act (gRPC's Act of the same embedding).
"""

import argparse
import asyncio
import base64
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.serving_load import ACT, Call, check_answered, repeat, summary
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.v1 import policy_pb2 as pb
from penstock.v1.refusal_pb2 import REASON_OVERLOADED
from penstock.wire.tensor import to_tensor

_AGAIN_S: Final = 0.005
_drawn = np.random.default_rng(1).normal(size=1536)
EMBEDDING: Final = (_drawn / np.linalg.norm(_drawn)).astype(np.float32)


def body_of(what: str) -> bytes:
    """Return the body of a request, its embedding as `numbers` or as `base64`."""
    held: Any = EMBEDDING.tolist() if what == "numbers" else base64.b64encode(EMBEDDING.tobytes()).decode()
    return json.dumps({"embedding": held}).encode()


async def call_select(address: str, body: bytes) -> Call:
    """Return a call over a connection that stays open; nothing of the answer is parsed but its length."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /select_action HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def call() -> None:
        writer.write(data)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {answer!r}")
        length = answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))

    return call


def call_act(channel: Any) -> Call:
    """Return a call of Act, with the value, as the gateway asks for it; again where it has no room."""
    ask = channel.unary_unary(ACT)
    part = pb.Part(value=to_tensor(EMBEDDING))
    data = pb.ActRequest(policy="default", observation=[part], want_value=True).SerializeToString()

    async def call() -> None:
        while True:
            reply = await ask(data)
            if pb.ActReply.FromString(reply).refusal.reason != REASON_OVERLOADED:
                break
            await asyncio.sleep(_AGAIN_S)
        check_answered(reply)

    return call


async def measure(what: str, address: str, in_flight: int, seconds: float) -> list[float]:
    """Return latencies in seconds of what was answered after the warm-up."""
    if what != "act":
        body = body_of(what)
        return await repeat([await call_select(address, body) for _ in range(in_flight)], seconds)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return await repeat([call_act(channel) for _ in range(in_flight)], seconds)


def ask(runner: asyncio.Runner, arguments: Sequence[str]) -> dict[str, float]:
    """Measure once: calls, rate per second, p50_ms, p99_ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompts_load")
    parser.add_argument("what", choices=("numbers", "base64", "act"))
    parser.add_argument("address")
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    said = parser.parse_args(arguments)
    run: Callable[[Awaitable[list[float]]], list[float]] = runner.run  # type: ignore[assignment]
    latencies = run(measure(said.what, said.address, said.in_flight, said.seconds))
    return summary(latencies, said.seconds)


def main() -> None:
    """Measure and print; without arguments once for each line of them that comes."""
    with asyncio.Runner() as runner:
        for arguments in [sys.argv[1:]] if len(sys.argv) > 1 else map(str.split, sys.stdin):
            print(json.dumps(ask(runner, arguments)), flush=True)


if __name__ == "__main__":
    main()
