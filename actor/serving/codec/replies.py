"""The bytes of a reply without its message: put together from pieces that protobuf wrote before.

    request id │ path, dtype and shape │ action │ … │ how many │ log-probabilities │ version, arm, fallback
                  written once                          written once                     written once each

Serialised messages behind one another are one message, so pieces can be written by themselves; what lies at the end
of one, as many bytes as before, can be another's. Fields stand in the order in which protobuf writes them itself.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Final

from google.protobuf.message import Message

from actor.serving.codec.arrays import Layout
from actor.serving.inference.forward_pass import Answer
from penstock.registry.routing import Arm
from penstock.v1 import policy_pb2 as pb
from penstock.wire.spaces import Space, leaves, zeros
from penstock.wire.tensor import Array

ARMS: Final = {
    Arm.LATEST: pb.ARM_LATEST,
    Arm.ACTIVE: pb.ARM_ACTIVE,
    Arm.CANARY: pb.ARM_CANARY,
    Arm.PINNED: pb.ARM_PINNED,
}
FALLBACKS: Final = {
    "": pb.FALLBACK_UNSPECIFIED,
    "previous": pb.FALLBACK_PREVIOUS,
    "fixed": pb.FALLBACK_FIXED,
    "uniform": pb.FALLBACK_UNIFORM,
}


class ReplyEncoder:
    """Replies of a policy with action and log-probability, as most are."""

    def __init__(self, action: Layout, space: Space) -> None:
        self._action, self._leaves = action, list(leaves(space, "action"))
        self._before: dict[int, tuple[list[tuple[str, bytes]], bytes]] = {}
        """By batch: what stands before each leaf of the action, by name, and before the log-probabilities."""

    def encode(
        self, request: pb.ActRequest, action: Mapping[str, Array], answer: Answer, who: bytes
    ) -> bytes:
        """action: as the environment takes it, by name, [max(batch, 1), *shape]. who: see `answered_by`."""
        batch, request_id = request.batch, request.request_id
        before_action, before_log_prob = self._before.get(batch) or self._prepare(batch)
        pieces = [pb.ActReply(request_id=request_id).SerializeToString()] if request_id else []
        for name, piece in before_action:
            pieces += (piece, action[name].tobytes())
        pieces += (before_log_prob, answer.log_prob.tobytes(), who)
        return b"".join(pieces)

    def encode_rows(
        self, ids: Iterable[bytes], action: Mapping[str, Array], log_prob: Array, who: Iterable[bytes]
    ) -> list[bytes]:
        """A reply for each row of an answer, to requests for one observation. ids: as they stand in the message."""
        before_action, before_log_prob = self._before.get(0) or self._prepare(0)
        columns: list[Iterable[bytes]] = [ids]
        for name, piece in before_action:
            columns += (repeat(piece), _rows(action[name]))
        columns += (repeat(before_log_prob), _rows(log_prob), who)
        return list(map(b"".join, zip(*columns, strict=False)))  # what is repeated has no end

    def _prepare(self, batch: int) -> tuple[list[tuple[str, bytes]], bytes]:
        rows = batch or 1
        nothing = {name: zeros(leaf, (rows,)) for name, leaf in self._leaves}
        parts = zip(nothing, self._action.write(nothing, batch), strict=True)
        before_action = [(name, before(pb.ActReply(action=[part]), part.value.data)) for name, part in parts]
        before_log_prob = before(pb.ActReply(log_prob=[0.0] * rows), bytes(4 * rows))
        self._before[batch] = before_action, before_log_prob
        return self._before[batch]


@lru_cache(maxsize=64)
def answered_by(version: int, arm: Arm, fallback: str) -> bytes:
    """The last piece of a reply: who answered."""
    return pb.ActReply(version=version, arm=ARMS[arm], fallback=FALLBACKS[fallback]).SerializeToString()


def _rows(array: Array) -> list[bytes]:
    """The bytes of each row."""
    data, rows = array.tobytes(), len(array)
    size = len(data) // rows
    return [data[at : at + size] for at in range(0, len(data), size)]


def before(message: Message, last: bytes) -> bytes:
    """What is written of a message before its last bytes."""
    written = message.SerializeToString()
    assert written.endswith(last)
    return written.removesuffix(last)
