"""Requests to a policy server that are right, almost right, or nothing at all.

The same again for the same seed.
"""

import random
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from penstock.protocol.tensor import to_tensor
from penstock.v1 import policy_pb2 as pb
from tests.support.abuse.corpus import _change_bytes, _change_fields
from tests.support.abuse.wire import Rpc

SERVICE: Final = pb.DESCRIPTOR.services_by_name["PolicyService"]
STREAM: Final = f"/{SERVICE.full_name}/ActStream"
EPISODES: Final = ("", "x", "deadbeef-1-0", "a-b-c-d", "-", "\0")


def rpcs() -> list[Rpc]:
    """Every unary RPC of a policy server."""
    return [
        Rpc(f"/{SERVICE.full_name}/{method.name}", GetMessageClass(method.input_type))
        for method in SERVICE.methods
        if not method.client_streaming
    ]


def observing(value: Any = (0.0, 0.0, 0.0, 0.0), dtype: str = "float32", path: str = "") -> list[pb.Part]:
    """An observation of four numbers, or what the test makes of it."""
    return [pb.Part(path=path, value=to_tensor(np.asarray(value, dtype)))]


def asking(request_id: str = "", **fields: Any) -> pb.ActRequest:
    """A good Act, with some fields replaced."""
    return pb.ActRequest(**({"request_id": request_id, "observation": observing()} | fields))


def _base(name: str, rng: random.Random) -> Message:
    episode, request_id = rng.choice(EPISODES), str(rng.randrange(8))
    match name:
        case "Act":
            return asking(
                request_id,
                episode_id=rng.choice(("", episode)),
                action_mask=[pb.Part(value=to_tensor(np.array([True, False, True])))],
                want_value=True,
                want_distribution=True,
                seed=rng.randrange(4),
                version=rng.choice((0, 1, 7)),
            )
        case "StartEpisode":
            return pb.StartEpisodeRequest(request_id=request_id, client_key="fuzz")
        case "Reward":
            return pb.RewardRequest(
                episode_id=episode, request_id=request_id, rewards=[pb.StepReward(step=0, amount=1.0)]
            )
        case "EndEpisode":
            return pb.EndEpisodeRequest(
                episode_id=episode, ending=pb.ENDING_TRUNCATED, final_observation=observing(), reward=1.0
            )
        case _:
            return pb.DescribeRequest(policy="default")


def case(name: str, seed: int, number: int) -> bytes:
    """Case `number` of an RPC: fields changed, bytes changed, or bytes at random."""
    rng = random.Random(f"{seed}:{name}:{number}")
    kind = rng.randrange(3)
    if kind == 0:
        return _change_fields(rng, _base(name, rng)).SerializeToString()
    if kind == 1:
        return _change_bytes(rng, _base(name, rng).SerializeToString())
    return rng.randbytes(rng.choice((1, 2, 3, 8, 40, 400)))
