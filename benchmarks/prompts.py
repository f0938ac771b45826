"""The API of prompts hop by hop: bare FastAPI, bare Act of the same server, and `select_action` over both.

One gateway with a run of its own, of the recipe's very network; the client is another process. The CPU time
of a call is that of the process that answers, and of the policy server behind it. Bare FastAPI reads the same
body and answers with a constant: what routes that read their bytes themselves are compared with.

    python -m benchmarks.prompts load          a client; reads words of `measure` line by line
    python -m benchmarks.prompts bare PORT     bare FastAPI on loopback
"""

import asyncio
import base64
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.serving import Call, Places, answer_lines, check_answered, posting, repeated
from benchmarks.stand import PREFIX, Ask, Cell, Options, Table, client, cpu_seconds, listening, memory_bytes
from penstock.launch.inspection.processes import read_endpoints
from penstock.launch.run.supervisor import penstock
from penstock.protocol.limits import MIB
from penstock.protocol.tensor import to_tensor
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.runtime.health import read_endpoint
from penstock.v1 import policy_pb2 as pb
from penstock.v1.refusal_pb2 import REASON_OVERLOADED

SECONDS: Final = 2.0
AIM: Final = "p50 5 ms, p99 15 ms; 16 in flight 400 per s on two cores"
_drawn = np.random.default_rng(1).normal(size=1536)
EMBEDDING: Final = (_drawn / np.linalg.norm(_drawn)).astype(np.float32)
_PATIENCE_S: Final = 180.0
_ROUTE: Final = "/select_action"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kind of call. what: a word of `measure`. by: roles whose CPU time counts, who is asked first."""

    name: str
    what: str
    by: tuple[str, ...]
    in_flight: int = 1


_BOTH: Final = ("gateway", "server")
ROWS: Final = (
    Row(name="bare FastAPI, 30 KB of numbers", what="numbers", by=("bare",)),
    Row(name="bare FastAPI, 8 KB of base64", what="base64", by=("bare",)),
    Row(name="bare Act over gRPC", what="act", by=("server",)),
    Row(name="select_action, numbers", what="numbers", by=_BOTH),
    Row(name="select_action, base64", what="base64", by=_BOTH),
    Row(name="bare Act, 16 in flight", what="act", by=("server",), in_flight=16),
    Row(name="select_action, numbers, 16 in flight", what="numbers", by=_BOTH, in_flight=16),
    Row(name="select_action, base64, 16 in flight", what="base64", by=_BOTH, in_flight=16),
)


def table(options: Options) -> Table:
    """Return the rows; each figure is the median over the rounds, in which all rows take turns."""
    me = (sys.executable, "-m", "benchmarks.prompts")
    with listening(*me, "bare") as bare, _gateway() as there, client(*me, "load") as ask:
        there |= {"bare": bare}
        rounds = [[_measured(ask, row, there) for row in ROWS] for _ in range(options.repeat)]
        memory = {role: memory_bytes(pid) / MIB for role, (_, pid) in there.items()}
    names = ("rate", "p50_ms", "p99_ms", "cpu_us")
    rows: list[list[Cell]] = [
        [row.name, *(median(one[at][name] for one in rounds) for name in names)]
        for at, row in enumerate(ROWS)
    ]
    return Table(
        title="select_action of the API of prompts, hop by hop",
        columns=("", "per s", "p50 ms", "p99 ms", "CPU µs of the answer"),
        rows=rows,
        note=f"aim: {AIM}. MiB: " + ", ".join(f"{role} {size:.0f}" for role, size in sorted(memory.items())),
    )


def _measured(ask: Ask, row: Row, there: Places) -> dict[str, float]:
    before = sum(cpu_seconds(there[role][1]) for role in row.by)
    figures = ask(row.what, there[row.by[0]][0], row.in_flight)
    spent = sum(cpu_seconds(there[role][1]) for role in row.by) - before
    return figures | {"cpu_us": 1e6 * spent / figures["calls"]}


@contextmanager
def _gateway() -> Iterator[Places]:
    """Start a gateway with its run; yield who answers once actions are given."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        state, endpoints, log = Path(name) / "state", Path(name) / "gateway.json", Path(name) / "log"
        words = ("gateway", "prompts", "--listen", "127.0.0.1:0", "--state", str(state))
        with log.open("wb") as output:
            gateway = subprocess.Popen(
                penstock(*words, "--endpoints", str(endpoints)), stdout=output, stderr=output, cwd=name
            )
        try:
            address = _healthy(gateway, endpoints, log)
            found = read_endpoints(state / "run").values()
            there = {one.role: (str(one.address), one.pid) for one in found}
            yield there | {"gateway": (address, gateway.pid)}
        finally:
            gateway.terminate()
            gateway.wait(_PATIENCE_S)


def _healthy(gateway: "subprocess.Popen[bytes]", endpoints: Path, log: Path) -> str:
    until_s = time.monotonic() + _PATIENCE_S
    while (found := read_endpoint(endpoints)) is None or _status(str(found.address)) != 200:
        if gateway.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the gateway does not come up: {log.read_text()}")
        time.sleep(0.1)
    return str(found.address)


def _status(address: str) -> int:
    line = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
    line.request("GET", "/health")
    status = line.getresponse().status
    line.close()
    return status


def _serve_bare(port: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Asked(BaseModel):
        embedding: list[float] | str

    class Answered(BaseModel):
        """As large as the answer of the API of prompts."""

        action: int = 1
        mutation_type: str = "context-reduction"
        log_prob: float = -1.609438
        value: float = 0.123456
        version: int = 12
        ticket: str = "0123456789abcdef01234567"

    app = FastAPI(openapi_url=None)

    @app.post(_ROUTE)
    async def select_action(body: Asked) -> Answered:
        del body
        return Answered()

    uvicorn.run(app, host="127.0.0.1", port=port, http="h11", log_level="warning")


# ---- the client


async def measure(what: str, address: str, in_flight: int) -> dict[str, float]:
    """Return figures of a word: numbers or base64 (how JSON holds the embedding), act (gRPC)."""
    if what != "act":
        text = base64.b64encode(EMBEDDING.tobytes()).decode()
        body = json.dumps({"embedding": EMBEDDING.tolist() if what == "numbers" else text}).encode()
        return await repeated([await posting(address, _ROUTE, body) for _ in range(in_flight)], SECONDS)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return await repeated([_acting(channel) for _ in range(in_flight)], SECONDS)


def _acting(channel: Any) -> Call:
    """Return a call of Act, with the value, as the gateway asks for it; again where it has no room."""
    ask = channel.unary_unary("/penstock.v1.PolicyService/Act")
    part = pb.Part(value=to_tensor(EMBEDDING))
    data = pb.ActRequest(policy="default", observation=[part], want_value=True).SerializeToString()

    async def call() -> None:
        while True:
            reply = await ask(data)
            if pb.ActReply.FromString(reply).refusal.reason != REASON_OVERLOADED:
                break
            await asyncio.sleep(0.005)
        check_answered(reply)

    return call


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        _serve_bare(int(sys.argv[2]))
    else:
        answer_lines(measure)
