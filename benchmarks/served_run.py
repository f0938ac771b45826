"""The servers of the serving benchmark.

A policy server over a run's folder without training, and bare echoes.

python -m benchmarks.served_run ADDRESS     grpc.aio: each message is answered with the same ActReply
"""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from actor.serving.server_process import STREAMS_PER_CONNECTION
from benchmarks.fragments import RUN, Shape
from benchmarks.serving_load import ECHO
from learner.probe import make_probe
from learner.publish.final_policy import write_specification
from penstock.config.settings import ActorSection, PolicySection
from penstock.policy.build import build
from penstock.policy.policy import Policy
from penstock.policy.weights import encode
from penstock.registry.records import NewVersion, Origin
from penstock.registry.registry import Registry
from penstock.registry.weight_files import registry_url, write_kept
from penstock.rpc.server import build_server
from penstock.runtime.health import Health, announce, serve_http
from penstock.v1 import policy_pb2 as pb
from penstock.wire.spaces import Box, Discrete
from penstock.wire.specification import RunSpecification
from penstock.wire.tensor import to_tensor

SHAPE: Final = Shape(Box(np.full(4, -np.inf, np.float32), np.full(4, np.inf, np.float32)), 32, 1)
REPLY: Final = pb.ActReply(
    action=[pb.Part(value=to_tensor(np.array(1)))], log_prob=[-0.7], version=1, arm=pb.ARM_ACTIVE
).SerializeToString()
"""The policy server's reply to a single observation."""


SMALL: Final = PolicySection()
BY_TORCH: Final = PolicySection(hidden_sizes=(1024,) * 6, hidden_norm="batch")
"""A network that torch runs, long enough for the thread of long passes."""


def make_policy(seed: int = 1, section: PolicySection = SMALL) -> Policy:
    """Return a policy of CartPole's shapes; 64-64 unless `section` says otherwise."""
    return build(SHAPE.box, Discrete(2), section, seed)


def specification(section: PolicySection = SMALL) -> RunSpecification:
    """Return the specification that a learner would send to the policy server."""
    return replace(
        SHAPE.specification(),
        policy_json=section.canonical_json(),
        actor_json=ActorSection().canonical_json(),
        probe=make_probe(SHAPE.box, make_policy(section=section), 0),
    )


def make_run(folder: Path, section: PolicySection = SMALL) -> None:
    """Make a run's folder with one version, active."""
    (folder / "policies").mkdir(parents=True)
    write_specification(folder, specification(section))
    blob = encode(make_policy(section=section))
    write_kept(folder, 1, blob)
    with Registry.open(registry_url(folder), migrate=True) as registry:
        new = NewVersion(
            policy="default",
            version=1,
            run=RUN,
            update=1,
            sha256=hashlib.sha256(blob).hexdigest(),
            size_bytes=len(blob),
            origin=Origin.FINAL,
        )
        registry.register(new, by="bench")
        registry.promote("default", 1, "for the benchmark", by="bench")


async def _unary(_request: bytes, _context: Any) -> bytes:
    return REPLY


def _forward() -> Any:
    """Return a handler as `_unary`, with a forward pass and a draw for each message.

    It costs what a policy costs in a server, and nothing else.
    """
    policy, observation = make_policy(), {"observation": np.zeros((1, 4), np.float32)}

    async def forward(_request: bytes, _context: Any) -> bytes:
        policy.act(observation)
        return REPLY

    return forward


async def _stream(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield REPLY


async def echo(address: str) -> None:
    """Serve until killed."""
    front = build_server((), streams_per_connection=STREAMS_PER_CONNECTION)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Forward": grpc.unary_unary_rpc_method_handler(_forward()),
        "Stream": grpc.stream_stream_rpc_method_handler(_stream),
    }
    front.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO, handlers),))
    front.server.add_insecure_port(address)
    await front.server.start()
    health = Health("echo")
    health.set_ready(True)
    announce("echo", metrics_port=serve_http(health, "127.0.0.1", 0)[1], address=address)
    await front.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(echo(sys.argv[1]))
