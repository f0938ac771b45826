"""Writes replies: as messages, and as bytes put together from pieces that protobuf wrote before.

    request id │ path, dtype and shape │ action │ … │ how many │ log-probabilities │ version, arm, fallback
                  written once                          written once                     written once each

Serialised messages behind one another are one message, so pieces can be written by themselves; the data at
the end of one can be replaced by as many other bytes. Fields stand in the order in which protobuf writes them
itself.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from google.protobuf.message import Message

from penstock.actor.serving.codec.arrays import Layout, Parts
from penstock.actor.serving.inference.forward_pass import Answer
from penstock.actor.serving.versions.answering import Answered
from penstock.protocol.spaces import Dict, Space, leaves, zeros
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.v1 import policy_pb2 as pb

ARMS: Final = {
    Arm.LATEST: pb.ARM_LATEST,
    Arm.ACTIVE: pb.ARM_ACTIVE,
    Arm.CANARY: pb.ARM_CANARY,
    Arm.PINNED: pb.ARM_PINNED,
}
_FALLBACKS: Final = {
    "": pb.FALLBACK_UNSPECIFIED,
    "previous": pb.FALLBACK_PREVIOUS,
    "fixed": pb.FALLBACK_FIXED,
    "uniform": pb.FALLBACK_UNIFORM,
}


class ReplyWriter:
    """Writes the replies of one server."""

    def __init__(self, action: Space, state: Dict) -> None:
        """Prepare for the spaces of one policy.

        state: space of what the policy remembers between steps, without leaves where it remembers nothing.
        """
        self._action, self._leaves = Layout("action", action), list(leaves(action, "action"))
        self._state, self._remembers = Layout("state", state), bool(list(leaves(state, "state")))
        self._before: dict[int, tuple[list[tuple[str, bytes]], bytes]] = {}
        """By batch: what stands before each leaf of the action, by name, and before the log-probabilities."""

    def encode(self, request: pb.ActRequest, answered: Answered) -> bytes:
        """Return the bytes of `reply`."""
        answer = answered.answer
        if answer is None or answer.distribution is not None or answer.value is not None or self._remembers:
            return self.reply(request, answered).SerializeToString()
        return self._encode(request.request_id, request.batch, answered, answer)

    def encode_plain(self, request_id: str, answered: Answered, answer: Answer) -> bytes:
        """Return the bytes of the reply to a plain request. answer: of `answered`."""
        return self._encode(request_id, 0, answered, answer)

    def reply(self, request: pb.ActRequest, answered: Answered) -> pb.ActReply:
        """Return the message of an answer."""
        answer, batch = answered.answer, request.batch
        reply = pb.ActReply(
            request_id=request.request_id,
            action=self._action.write(answered.action, batch),
            version=0 if answer is None else answer.loaded.version,
            arm=ARMS[answered.arm],
            fallback=_FALLBACKS[answered.fallback],
        )
        if answer is not None:
            reply.log_prob.extend(answer.log_prob.tolist())
            if answer.distribution is not None:
                reply.distribution.extend(self._action.write_described(answer.distribution, batch))
            if answer.value is not None:
                reply.value.extend(answer.value.tolist())
        if self._remembers and not request.episode_id:
            # Where no policy answered nothing was seen: the caller goes on with what it has.
            kept: Parts = request.state if answer is None else self._state.write(answer.state, batch)
            reply.state.extend(kept)
        return reply

    def reply_taken(
        self, request: pb.ActRequest, answered: Answered, taken: Mapping[str, Array], version: int
    ) -> pb.ActReply:
        """Return the message for a caller that took an action of its own, beside this version.

        taken: by name, [1, *shape].
        """
        reply = self.reply(request, answered)
        del reply.action[:], reply.log_prob[:]
        reply.action.extend(self._action.write(taken, 0))
        if request.HasField("taken_log_prob"):
            reply.log_prob.append(request.taken_log_prob)
        reply.version = version
        return reply

    def _encode(self, request_id: str, batch: int, answered: Answered, answer: Answer) -> bytes:
        before_action, before_log_prob = self._before.get(batch) or self._prepare(batch)
        action = answered.action
        pieces = [pb.ActReply(request_id=request_id).SerializeToString()] if request_id else []
        for name, piece in before_action:
            pieces += (piece, action[name].tobytes())
        who = _answered_by(answer.loaded.version, answered.arm, answered.fallback)
        pieces += (before_log_prob, answer.log_prob.tobytes(), who)
        return b"".join(pieces)

    def _prepare(self, batch: int) -> tuple[list[tuple[str, bytes]], bytes]:
        rows = batch or 1
        nothing = {name: zeros(leaf, (rows,)) for name, leaf in self._leaves}
        parts = zip(nothing, self._action.write(nothing, batch), strict=True)
        before_action = [(name, before(pb.ActReply(action=[part]), part.value.data)) for name, part in parts]
        before_log_prob = before(pb.ActReply(log_prob=[0.0] * rows), bytes(4 * rows))
        self._before[batch] = before_action, before_log_prob
        return self._before[batch]


@lru_cache(maxsize=64)
def _answered_by(version: int, arm: Arm, fallback: str) -> bytes:
    """The last piece of a reply: who answered."""
    return pb.ActReply(version=version, arm=ARMS[arm], fallback=_FALLBACKS[fallback]).SerializeToString()


def before(message: Message, last: bytes) -> bytes:
    """The bytes of a message before its last ones, which must be `last`."""
    written = message.SerializeToString()
    assert written.endswith(last)
    return written.removesuffix(last)
