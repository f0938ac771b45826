"""Calls below every stub: raw bytes to any RPC of the broker, and what came back."""

import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import grpc
import lz4.frame
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from penstock.protocol.fragment import Fragment, Slot, WeightSpan
from penstock.protocol.limits import (
    MAX_EPISODES_PER_REPORT,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_MESSAGE_BYTES,
    MAX_PROBE_ANSWERS,
    MAX_SLOTS,
    MAX_TENSORS,
    MAX_WATCH_WAIT_MS,
    MAX_WEIGHT_BYTES,
    MIB,
)
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.v1 import control_pb2, experience_pb2, fragment_pb2, weights_pb2
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.simulated_actor import code_of
from tests.support.run.small_run import SLOTS, STEPS, fragment

DEADLINE_S: Final = 60
_FILES: Final = (experience_pb2, weights_pb2, control_pb2, health_pb2)


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method by its path, and the message that it takes."""

    path: str
    request: type[Message]

    def __str__(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a reply, or the status that ended the call."""

    code: grpc.StatusCode
    text: str = ""
    data: bytes = b""


def unary_rpcs() -> list[Rpc]:
    return [
        Rpc(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type))
        for file in _FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.server_streaming and not method.client_streaming
    ]


class RawChannel:
    """One connection without limits of its own; calls block."""

    def __init__(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> None:
        limits = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
        kept = [option for option in CHANNEL_OPTIONS if option[0] not in dict(limits)]
        self.channel = grpc.insecure_channel(address, options=[*kept, *limits, *options])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.channel.close()

    def send(self, path: str, data: bytes, **options: Any) -> Answer:
        return answer_of(self.start(path, data, **options))

    def start(self, path: str, data: bytes, **options: Any) -> Any:
        call = self.channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        return call.future(data, **{"timeout": DEADLINE_S, **options})


def answer_of(future: Any) -> Answer:
    try:
        return Answer(grpc.StatusCode.OK, data=bytes(future.result()))
    except grpc.RpcError as error:
        return Answer(*code_of(error))


EXPERIENCE: Final = "/penstock.v1.ExperienceService/"
WEIGHTS: Final = "/penstock.v1.WeightService/"
CONTROL: Final = "/penstock.v1.ControlService/"
HUGE: Final = 2**64 - 1
SHAPE: Final = (STEPS, SLOTS)


def reward(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(SHAPE, value, np.float32)


def header(session: int, **changes: Any) -> Fragment:
    good = fragment(session)
    return replace(good, header=replace(good.header, **changes))


def entry(session: int, tensor: str = "reward", /, **changes: Any) -> Fragment:
    good = fragment(session)
    rows = [row._replace(**changes) if row.name == tensor else row for row in good.header.tensors]
    return replace(good, header=replace(good.header, tensors=tuple(rows)))


def stored(session: int, name: str, data: bytes, codec: str = "lz4") -> Fragment:
    """A fragment that stores `data` for one tensor and says no more than the truth about its size."""
    good = fragment(session)
    rows, chunks, offset = [], [], 0
    for row in good.header.tensors:
        raw = good.payload[row.offset : row.offset + row.stored_size]
        chunk = data if row.name == name else raw
        chosen = codec if row.name == name else row.codec
        rows.append(row._replace(codec=chosen, stored_size=len(chunk), offset=offset))
        chunks.append(chunk)
        offset += len(chunk)
    return Fragment(replace(good.header, tensors=tuple(rows)), b"".join(chunks))


def span(session: int, **changes: int) -> Fragment:
    good = {"slot": 0, "start": 0, "length": STEPS, "version": 1, "update": 0}
    return header(session, weights=(WeightSpan(**{**good, **changes}),))


def _twice(session: int) -> Fragment:
    rows = fragment(session).header.tensors
    return header(session, tensors=(rows[0], rows[0], *rows[2:]))


def _holes(session: int) -> Fragment:
    good = fragment(session)
    rows = [row._replace(offset=row.offset + 1) for row in good.header.tensors]
    return Fragment(replace(good.header, tensors=tuple(rows)), b"\0" + good.payload)


FRAGMENTS: Final[dict[str, tuple[Callable[[int], Fragment], str]]] = {
    "reward is NaN": (lambda s: fragment(s, reward=reward(np.nan)), "reward: holds NaN"),
    "a bool of seven": (
        lambda s: stored(s, "valid", b"\x07" * (STEPS * SLOTS), "raw"), "valid: holds a bool"
    ),
    "unknown dtype": (lambda s: entry(s, dtype="object"), "dtype object"),
    "shape product overflows 2^63": (lambda s: entry(s, shape=(2**32, 2**32)), "too large axis"),
    "raw size of 2^63": (lambda s: entry(s, raw_size=2**63), "raw_size"),
    "offset of 2^63": (lambda s: entry(s, offset=2**63), "offset"),
    "overlapping tensors": (lambda s: entry(s, "valid", offset=0), "valid: offset 0"),
    "hole before the first tensor": (_holes, "offset 1, 0 expected"),
    "payload too short": (lambda s: replace(fragment(s), payload=fragment(s).payload[:-1]), "payload:"),
    "codec of a pickle": (lambda s: entry(s, codec="pickle"), "codec 'pickle'"),
    "lz4 that is zlib, where it is not read": (
        lambda s: stored(s, "observation", zlib.compress(bytes(120))), "observation: not an lz4 frame"
    ),
    "lz4 that is cut off": (
        lambda s: stored(s, "reward", lz4.frame.compress(bytes(32))[:-9]), "reward: "
    ),
    "lz4 that promises another size": (
        lambda s: stored(s, "observation", lz4.frame.compress(bytes(64))), "its frame promises 64 bytes"
    ),
    "lz4 bomb": (lambda s: stored(s, "reward", lz4.frame.compress(bytes(64 * MIB))), "reward: decodes to 33"),
    "lz4 bomb where it is not read": (
        lambda s: stored(s, "observation", lz4.frame.compress(bytes(64 * MIB))), "its frame promises 67108864"
    ),
    "a tensor twice": (_twice, "give each tensor of the schema once"),
    "another run": (lambda s: fragment(s, run="run-b"), "header.run='run-b'"),
    "sequence beyond 2^53": (lambda s: header(s, sequence=2**53 + 1), "at most 2^53"),
    "T beyond the unroll length": (lambda s: header(s, steps=STEPS + 1), "header.steps=5"),
    "slot that counts beyond 2^53": (
        lambda s: header(s, slots=(Slot(0, HUGE, 0), Slot(1, 0, 0))), "header.slots"
    ),
    "more spans than steps": (
        lambda s: header(s, weights=(WeightSpan(0, 0, 1, 1, 0),) * 9), "header.weights: 9 spans"
    ),
    "span of a version from the future": (lambda s: span(s, version=2**30), "version"),
    "span of version 2^64 - 1": (lambda s: span(s, version=HUGE), "header.weights"),
    "span of update 2^64 - 1": (lambda s: span(s, update=HUGE), "header.weights"),
    "span that wraps around": (lambda s: span(s, start=2**32 - 1, length=2), "header.weights"),
    "group of 10 kB": (lambda s: header(s, group_id="g" * 10_000), "header.group_id"),
    "round beyond 2^53": (lambda s: header(s, round=HUGE), "round=18446744073709551615"),
}  # fmt: skip


def _append(session: int, *given: fragment_pb2.Fragment, **fields: int) -> bytes:
    return experience.AppendRequest(session=session, fragments=given, **fields).SerializeToString()


def _good(session: int, sequence: int = 1) -> fragment_pb2.Fragment:
    return to_proto(fragment(session, sequence))


def _kind(session: int, kind: int) -> bytes:
    message = _good(session)
    message.header.kind = kind  # type: ignore[assignment]
    return _append(session, message)


def _unknown_bytes(session: int) -> bytes:
    message = _good(session)
    message.header.MergeFromString(b"\x9a\x06" + b"\x80\x80\x40" + bytes(MIB))
    return _append(session, message)


def _wide(session: int, **rows: int) -> bytes:
    message = _good(session)
    for name, count in rows.items():
        for _ in range(count):
            getattr(message.header, name).add()
    return _append(session, message)


def _long_shape(session: int) -> bytes:
    message = _good(session)
    message.header.tensors[0].shape.extend([1] * MIB)
    return _append(session, message)


def _open(**fields: Any) -> bytes:
    return experience.OpenSessionRequest(**fields).SerializeToString()


def _report(session: int, sequence: int = 1, count: int = 1, **fields: Any) -> bytes:
    episodes = [experience.Episode(**fields)] * count
    request = experience.ReportEpisodesRequest(session=session, sequence=sequence, episodes=episodes)
    return request.SerializeToString()


def _watch(session: int, **fields: Any) -> bytes:
    return weights_pb2.WatchLatestRequest(session=session, **fields).SerializeToString()


def _chunk(session: int, **fields: Any) -> bytes:
    return weights_pb2.GetWeightsRequest(session=session, **fields).SerializeToString()


def _named(name: str, request_id: str = "id") -> bytes:
    return control_pb2.RestoreRequest(name=name, request_id=request_id).SerializeToString()


def _kept(name: str, request_id: str) -> bytes:
    return control_pb2.ControlRequest(name=name, request_id=request_id).SerializeToString()


def _flush(request_id: str, min_steps: int = 1) -> bytes:
    return control_pb2.FlushRequest(request_id=request_id, min_steps=min_steps).SerializeToString()


def _reason(text: str) -> bytes:
    message: Message = control_pb2.ControlRequest(reason=text)
    return message.SerializeToString()


CALLS: Final[dict[str, tuple[str, Callable[[int], bytes], str]]] = {
    "actor without a name": (f"{EXPERIENCE}OpenSession", lambda _: _open(role=1), "actor_id=''"),
    "actor named by a path": (
        f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="../x", role=1), "actor_id='../x'"
    ),
    "actor named with NUL": (
        f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="a\0", role=1), "actor_id="
    ),
    "actor named in Cyrillic": (
        f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="\u0430", role=1), "actor_id="
    ),
    "actor named with 65 letters": (
        f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="a" * 65, role=1), "actor_id="
    ),
    "actor named with 1 MiB": (
        f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="a" * MIB, role=1), "at most 16384"
    ),
    "actor without a role": (f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="a"), "role=0"),
    "actor of an unknown role": (f"{EXPERIENCE}OpenSession", lambda _: _open(actor_id="a", role=9), "role=9"),
    "append of session 0": (f"{EXPERIENCE}Append", lambda _: _append(0, _good(1)), "session=0"),
    "append of session 2^64 - 1": (
        f"{EXPERIENCE}Append", lambda _: _append(HUGE, _good(1)), f"session={HUGE}"
    ),
    "append of nothing": (f"{EXPERIENCE}Append", _append, "fragments: 0"),
    "append of too many fragments": (
        f"{EXPERIENCE}Append",
        lambda s: _append(s, *[_good(s)] * (MAX_FRAGMENTS_PER_APPEND + 1)),
        f"fragments: more in one Append than {MAX_FRAGMENTS_PER_APPEND}",
    ),
    "append that was acknowledged 2^64 - 1": (
        f"{EXPERIENCE}Append", lambda s: _append(s, _good(s), acked_through=HUGE), f"acked_through={HUGE}"
    ),
    "append above the message limit": (
        f"{EXPERIENCE}Append",
        lambda s: _append(s, fragment_pb2.Fragment(payload=bytes(MAX_MESSAGE_BYTES))),
        f"at most {MAX_MESSAGE_BYTES}",
    ),
    "append of four million empty fragments": (
        f"{EXPERIENCE}Append", lambda _: b"\x1a\x00" * (MAX_MESSAGE_BYTES // 2), "fragments: more in one"
    ),
    "append of four million numbers": (
        f"{EXPERIENCE}Append", lambda _: b"\x08\x01" * (MAX_MESSAGE_BYTES // 2), "more than 1024 fields"
    ),
    "header of too many slots": (
        f"{EXPERIENCE}Append", lambda s: _wide(s, slots=MAX_SLOTS + 1), "header.slots: more than 4096"
    ),
    "header of too many spans": (
        f"{EXPERIENCE}Append", lambda s: _wide(s, weights=MAX_SLOTS + 1), "header.weights: more than 4096"
    ),
    "header of too many tensors": (
        f"{EXPERIENCE}Append", lambda s: _wide(s, slots=2000, tensors=MAX_TENSORS + 1), "header.tensors: more"
    ),
    "dtype of 10 kB": (
        f"{EXPERIENCE}Append",
        lambda s: _append(s, to_proto(entry(s, dtype="f" * 10_000))),
        "a row of",
    ),
    "shape of a million axes": (f"{EXPERIENCE}Append", _long_shape, "header.tensors: a row of"),
    "a group where no field is": (
        f"{EXPERIENCE}Append", lambda s: _append(s, _good(s)) + b"\x7b\x7c", "no field begins"
    ),
    "a million nested groups": (
        f"{EXPERIENCE}Append",
        lambda s: _append(s, _good(s)) + b"\x7b" * MIB + b"\x7c" * MIB,
        "no field begins",
    ),
    "append that is cut off": (f"{EXPERIENCE}Append", lambda s: _append(s, _good(s))[:-1], "cut off"),
    "text where there must be UTF-8": (
        f"{EXPERIENCE}OpenSession", lambda _: b"\x0a\x02\xff\xfe", "no OpenSessionRequest"
    ),
    "a length beyond the message": (
        f"{EXPERIENCE}OpenSession", lambda _: b"\x0a\xff\xff\xff\xff\x07", "no OpenSessionRequest"
    ),
    "a number of 11 bytes": (
        f"{EXPERIENCE}CloseSession", lambda _: b"\x08" + b"\xff" * 11, "no CloseSessionRequest"
    ),
    "close of session 0": (f"{EXPERIENCE}CloseSession", lambda _: b"", "session=0"),
    "report 0": (f"{EXPERIENCE}ReportEpisodes", lambda s: _report(s, 0), "sequence=0"),
    "report 2^64 - 1": (f"{EXPERIENCE}ReportEpisodes", lambda s: _report(s, HUGE), f"sequence={HUGE}"),
    "report of session 0": (f"{EXPERIENCE}ReportEpisodes", lambda _: _report(0), "session=0"),
    "report of too many episodes": (
        f"{EXPERIENCE}ReportEpisodes",
        lambda s: _report(s, count=MAX_EPISODES_PER_REPORT + 1),
        "episodes: 4097",
    ),
    "return of NaN": (
        f"{EXPERIENCE}ReportEpisodes", lambda s: _report(s, episode_return=float("nan")), "episode_return=nan"
    ),
    "return that overflows in a sum": (
        f"{EXPERIENCE}ReportEpisodes",
        lambda s: _report(s, episode_return=1.7e308),
        "episode_return=1.7e+308",
    ),
    "watch of session 0": (f"{WEIGHTS}WatchLatest", lambda _: _watch(0), "session=0"),
    "watch that waits for hours": (
        f"{WEIGHTS}WatchLatest", lambda s: _watch(s, wait_ms=MAX_WATCH_WAIT_MS + 1), "wait_ms=30001"
    ),
    "watch that began sequence 2^64 - 1": (
        f"{WEIGHTS}WatchLatest", lambda s: _watch(s, begun_through=HUGE), f"begun_through={HUGE}"
    ),
    "watch that applied version 2^64 - 1": (
        f"{WEIGHTS}WatchLatest", lambda s: _watch(s, applied_version=HUGE), f"applied_version={HUGE}"
    ),
    "watch that knows revision 2^64 - 1": (
        f"{WEIGHTS}WatchLatest", lambda s: _watch(s, known_revision=HUGE), f"known_revision={HUGE}"
    ),
    "digest that is none": (
        f"{WEIGHTS}WatchLatest", lambda s: _watch(s, applied_sha256="../" * 21 + "x"), "applied_sha256="
    ),
    "too many answers to the probe": (
        f"{WEIGHTS}WatchLatest",
        lambda s: _watch(s, probe_log_prob=[0.0] * (MAX_PROBE_ANSWERS + 1)),
        "probe_log_prob: 65",
    ),
    "weights of version 0": (f"{WEIGHTS}GetWeights", lambda s: _chunk(s), "version=0"),
    "weights from beyond every size": (
        f"{WEIGHTS}GetWeights", lambda s: _chunk(s, version=1, offset=MAX_WEIGHT_BYTES + 1), "offset="
    ),
    "pause with 1 KiB of reason": (f"{CONTROL}Pause", lambda _: _reason("x" * 1025), "reason: 1025"),
    "stop with 1 MiB of reason": (f"{CONTROL}Stop", lambda _: _reason("x" * MIB), "at most 16384"),
    "restore of a path": (f"{CONTROL}Restore", lambda _: _named("../x"), "name='../x'"),
    "restore without an id": (f"{CONTROL}Restore", lambda _: _named("a", ""), "request_id=''"),
    "checkpoint named by a path": (f"{CONTROL}Checkpoint", lambda _: _kept("/etc", "id"), "name='/etc'"),
    "named checkpoint without an id": (f"{CONTROL}Checkpoint", lambda _: _kept("a", ""), "request_id: empty"),
    "flush without an id": (f"{CONTROL}Flush", lambda _: _flush(""), "request_id=''"),
    "flush of 2^64 - 1 steps": (f"{CONTROL}Flush", lambda _: _flush("a", HUGE), f"min_steps={HUGE}"),
    "pickle as a request": (f"{CONTROL}Stop", lambda _: b"\x80\x04\x95\x1d\x00\x00\x00", "no StopRequest"),
    "kind that is not said": (f"{EXPERIENCE}Append", lambda s: _kind(s, 0), "INVALID header.kind=0"),
    "kind that does not exist": (f"{EXPERIENCE}Append", lambda s: _kind(s, 7), "INVALID header.kind=7"),
    "header of unknown fields": (f"{EXPERIENCE}Append", _unknown_bytes, "INVALID header:"),
}  # fmt: skip


DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE: Final = 4
CANCEL: Final = 8
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(data: bytes, *, promised: int | None = None) -> bytes:
    """A gRPC message; `promised` is the length that it claims."""
    return b"\0" + struct.pack(">I", len(data) if promised is None else promised) + data


class Connection:
    """One connection; `stream` is the number of the newest call."""

    def __init__(self, address: str, *, window: int = 65_535) -> None:
        """Window: bytes of a reply that the peer may send unasked."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.stream = -1
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.send(_PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def headers(self, path: str, extra: Iterable[tuple[str, str]] = ()) -> bytes:
        self.stream += 2
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *extra,
        ]
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
        return frame(HEADERS, END_HEADERS, self.stream, block)

    def call(self, path: str, data: bytes) -> None:
        """A whole unary call; its reply is left where it is."""
        self.send(self.headers(path) + frame(DATA, END_STREAM, self.stream, message(data)))

    def half_a_call(self, path: str, data: bytes, promised: int) -> None:
        self.send(self.headers(path) + frame(DATA, 0, self.stream, message(data, promised=promised)))

    def read_until(self, kind: int) -> None:
        """Read frames until one of this kind; EOFError when the peer closes before."""
        while True:
            head = self._read(9)
            self._read(int.from_bytes(head[:3]))
            if head[3] == kind:
                return

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def is_closed(self) -> bool:
        """Read what came; True when the peer has closed the connection."""
        try:
            while self.socket.recv(65_536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def _text(text: str) -> bytes:
    """A string literal: length with a prefix of seven bits, then the bytes."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest > 127:
        length += bytes([rest & 127 | 128])
        rest >>= 7
    return length + bytes([rest]) + data
