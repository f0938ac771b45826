"""Requests that are almost right, endless and the same again for the same seed."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from penstock.protocol.tensor import to_tensor
from penstock.v1 import control_pb2, weights_pb2
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import policy_pb2 as pb
from tests.support.abuse.wire import Rpc
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.small_run import fragment

NUMBERS: Final = (
    0, 1, 2, 3, 7, 127, 128, 255, 4095, 4097,
    2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63, 2**64 - 1,
)  # fmt: skip
TEXTS: Final = (
    "", "a", "run-a", "default", "raw", "lz4", "reward", "observation", "float32", "object",
    "a" * 64, "a" * 65, "../../etc/passwd", "a:b", "*", "\0", "\x7f", "\r\n", "é", "\U0001f600",
    "{}", "'; DROP", "%s%n", "x" * 3000,
)  # fmt: skip
BYTES: Final = (b"", b"\0", b"\xff" * 40, b"\x80\x04N.", b"PK\x03\x04", b'\x04"M\x18', bytes(2000))
REALS: Final = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
ROLES: Final = (experience.ROLE_ROLLOUT, experience.ROLE_SERVER, experience.ROLE_EVALUATION)
OVERWRITES: Final = (b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\x7f", struct.pack("<d", float("nan")))


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes for one RPC; `str` of it is enough to make it again."""

    rpc: Rpc
    seed: int
    number: int
    data: bytes

    def __str__(self) -> str:
        shown = self.data[:200].hex() + ("..." if len(self.data) > 200 else "")
        return f"make_case({self.rpc}, seed={self.seed}, number={self.number}) = {shown}"


def make_case(rpc: Rpc, seed: int, number: int, session: int) -> Case:
    """Case `number` of a seed; `session` is one that is open."""
    rng = random.Random(f"{seed}:{rpc}:{number}")
    kind = rng.randrange(3)
    if kind == 0:
        data = _change_fields(rng, _base(rpc, rng, session)).SerializeToString()
    elif kind == 1:
        data = _change_bytes(rng, _base(rpc, rng, session).SerializeToString())
    else:
        data = rng.randbytes(rng.choice((1, 2, 3, 8, 40, 400)))
    return Case(rpc, seed, number, data)


def _base(rpc: Rpc, rng: random.Random, session: int) -> Message:
    makers: dict[str, Callable[[], Message]] = {
        "OpenSession": lambda: experience.OpenSessionRequest(actor_id="fuzzed", role=rng.choice(ROLES)),
        "Append": lambda: _append(rng, session),
        "CloseSession": lambda: experience.CloseSessionRequest(session=2**40),
        "ReportEpisodes": lambda: _report(2**40),
        "WatchLatest": lambda: weights_pb2.WatchLatestRequest(
            session=session, known_version=1, applied_version=1, applied_sha256="0" * 64, probe_log_prob=[0.5]
        ),
        "GetWeights": lambda: weights_pb2.GetWeightsRequest(session=session, version=1, offset=3),
    }
    if str(rpc) in makers:
        return makers[str(rpc)]()
    if rpc.request is control_pb2.ControlRequest:
        return control_pb2.ControlRequest(reason="because")
    return rpc.request()


def _append(rng: random.Random, session: int) -> Message:
    first = rng.choice((1, 2, 50))
    given = [fragment(session, first + index) for index in range(rng.choice((1, 1, 3)))]
    return experience.AppendRequest(session=session, fragments=[to_proto(each) for each in given])


def _report(session: int) -> Message:
    return experience.ReportEpisodesRequest(
        session=session, sequence=1000, episodes=[experience.Episode(episode_return=1.0, length=9, version=1)]
    )


def _change_fields(rng: random.Random, message: Message) -> Message:
    for _ in range(rng.choice((1, 1, 2, 5))):
        _change_field(rng, _somewhere(rng, message))
    return message


def _somewhere(rng: random.Random, message: Message) -> Message:
    inner: list[Message] = []
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner += list(value) if field.is_repeated else [value]
    return message if not inner or rng.random() < 0.25 else _somewhere(rng, rng.choice(inner))


def _change_field(rng: random.Random, message: Message) -> None:
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    if field.type == FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.15:
        message.ClearField(field.name)
        return
    if field.is_repeated:
        values: Any = getattr(message, field.name)
        values.extend(_value(rng, field) for _ in range(rng.choice((1, 3, 70))))
    else:
        setattr(message, field.name, _value(rng, field))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(BYTES if field.type == FieldDescriptor.TYPE_BYTES else TEXTS)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(REALS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 9, 2**31 - 1, -1))
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice(NUMBERS) % 2**32
        case _:
            return rng.choice(NUMBERS)


CHANGES: Final[tuple[Callable[[random.Random, bytes, int], bytes], ...]] = (
    lambda rng, data, at: data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
    lambda rng, data, at: data[:at] + data[at + rng.choice((1, 2, 16)) :],
    lambda rng, data, at: data[:at] + rng.randbytes(rng.choice((1, 2, 9))) + data[at:],
    lambda _, data, at: data[:at],
    lambda rng, data, _: data * rng.choice((2, 3)),
    lambda rng, data, at: data[:at] + (new := rng.choice(OVERWRITES)) + data[at + len(new) :],
)
"""One bit is turned, bytes go, come, end, are repeated or overwritten."""


def _change_bytes(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 2, 6))):
        if data:
            data = rng.choice(CHANGES)(rng, data, rng.randrange(len(data)))
    return data


SERVICE: Final = pb.DESCRIPTOR.services_by_name["PolicyService"]
STREAM: Final = f"/{SERVICE.full_name}/ActStream"
EPISODES: Final = ("", "x", "deadbeef-1-0", "a-b-c-d", "-", "\0")


def rpcs() -> list[Rpc]:
    return [
        Rpc(f"/{SERVICE.full_name}/{method.name}", GetMessageClass(method.input_type))
        for method in SERVICE.methods
        if not method.client_streaming
    ]


def observing(value: Any = (0.0, 0.0, 0.0, 0.0), dtype: str = "float32", path: str = "") -> list[pb.Part]:
    return [pb.Part(path=path, value=to_tensor(np.asarray(value, dtype)))]


def asking(request_id: str = "", **fields: Any) -> pb.ActRequest:
    return pb.ActRequest(**({"request_id": request_id, "observation": observing()} | fields))


def _policy_corpus_base(name: str, rng: random.Random) -> Message:
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
        return _change_fields(rng, _policy_corpus_base(name, rng)).SerializeToString()
    if kind == 1:
        return _change_bytes(rng, _policy_corpus_base(name, rng).SerializeToString())
    return rng.randbytes(rng.choice((1, 2, 3, 8, 40, 400)))
