"""Requests as most are, one observation and nothing else: from bytes to bytes, all of a pass at once.

    request    policy │ request id │ path, dtype and shape │ observation │ …
    reply               request id │ path, dtype and shape │ action │ … │ log-probability │ version, arm

No message is made of such a request. It is known by the bytes that protobuf writes around the observation, and its id
stands in the reply as it stands there. What says more, is written in another order or holds numbers that are not finite
is not plain: the desk reads it as a message, and says what is wrong with it.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from actor.serving.codec.arrays import Layout
from actor.serving.codec.replies import ReplyEncoder, before
from actor.serving.inference.forward_pass import Answer, Loaded, NotFinite, Question, answer, ready
from penstock.v1 import policy_pb2 as pb
from penstock.wire.spaces import Box, Leaf, Space, leaves, zeros
from penstock.wire.tensor import DTYPES, FEW, Array, all_finite

_ID: Final = pb.ActRequest(request_id="?").SerializeToString()[0]
"""The byte in front of an id and its length; that of a reply is the same."""
_FORMATS: Final = {"float16": "e", "float32": "f", "float64": "d"}


class PlainForm:
    """How plain requests of a space are written; all that is here is done for every request."""

    def __init__(self, policy: str, observation: Layout, space: Space, encoder: ReplyEncoder) -> None:
        """observation: of `space`. Where a leaf must be looked at value by value no request is plain."""
        self._policy, self._encoder = pb.ActRequest(policy=policy).SerializeToString(), encoder
        every = list(leaves(space, "observation"))
        parts = observation.write({name: zeros(leaf, (1,)) for name, leaf in every}, 0)
        self._length = len(pb.ActRequest(observation=parts).SerializeToString())
        self._leaves: list[_Leaf] = []
        at = -self._length
        for (name, leaf), part in zip(every, parts, strict=True):
            self._leaves.append(_Leaf(name, leaf, part, at))
            at = self._leaves[-1].end
        self._has_any = all(one.is_free for one in self._leaves)

    def holds(self, data: bytes) -> bool:
        """Whether these bytes are a plain request."""
        bare = data.removeprefix(self._policy)
        lead = len(bare) - self._length
        if not self._has_any or lead < 0 or (lead and not _is_id(bare, lead)):
            return False
        for leaf in self._leaves:  # noqa: SIM110 - a generator costs more than what it would ask
            if not leaf.fits(data):
                return False
        return True

    def observation(self, asked: "Sequence[Plain]") -> dict[str, Array]:
        """Of all of them, a row each, by name."""
        return {leaf.name: leaf.rows(asked) for leaf in self._leaves}

    def answer(self, loaded: Loaded, asked: "Sequence[Plain]") -> list[bytes]:
        """The bytes of the reply to each, of one forward pass; raises FloatingPointError where a number is none."""
        policy = loaded.policy
        acted = policy.choose(policy.step(self.observation(asked)).parameters, loaded.random)
        if not all_finite(acted.log_prob):
            raise FloatingPointError
        return self.replies(asked, ready(policy, acted), acted.log_prob)

    def replies(
        self, asked: "Sequence[Plain]", action: Mapping[str, Array], log_prob: NDArray[np.float32]
    ) -> list[bytes]:
        """The bytes of the reply to each. action: as the environment takes it, by name, a row each."""
        prefix, length = self._policy, self._length
        ids = [one.data.removeprefix(prefix)[:-length] for one in asked]
        return self._encoder.encode_rows(ids, action, log_prob, [one.who for one in asked])


@dataclass(slots=True, eq=False)
class Plain:
    """A plain request, as it came. who: the end of its reply, see `answered_by`."""

    form: PlainForm
    data: bytes
    who: bytes
    rows: ClassVar[int] = 1


class _Leaf:
    """One leaf of the observation. Places are counted from the end of a request.

    is_free: any number will do, if it is finite.
    """

    def __init__(self, name: str, leaf: Leaf, part: pb.Part, begin: int) -> None:
        size = len(part.value.data)
        self.name, self._before = name, before(pb.ActRequest(observation=[part]), part.value.data)
        self._begin, self._at = begin, begin + len(self._before)
        self.end = self._at + size
        self._dtype, self._shape = DTYPES[leaf.dtype], leaf.shape
        self.is_free = isinstance(leaf, Box) and leaf.dtype != "bool" and size > 0
        self._is_real = leaf.dtype in _FORMATS
        count = size // self._dtype.itemsize
        few = f"<{count}{_FORMATS[leaf.dtype]}" if self._is_real and count <= FEW else ""
        self._unpack = struct.Struct(few).unpack_from if few else None

    def fits(self, data: bytes) -> bool:
        """Whether a request holds finite numbers of this leaf; in doubt not."""
        if data[self._begin : self._at] != self._before:
            return False
        if self._unpack is not None:
            return math.isfinite(sum(self._unpack(data, self._at)))
        return not self._is_real or all_finite(np.frombuffer(self._numbers(data), self._dtype))

    def rows(self, asked: Sequence[Plain]) -> Array:
        """Of all requests, [n, *shape]."""
        joined = b"".join([self._numbers(one.data) for one in asked])
        return np.frombuffer(joined, self._dtype).reshape(len(asked), *self._shape)

    def _numbers(self, data: bytes) -> bytes:
        return data[self._at : self.end or None]


def _is_id(data: bytes, length: int) -> bool:
    """Whether so many bytes are a request id, of at most 127 characters that are a byte each."""
    return length > 2 and data[0] == _ID and data[1] == length - 2 and data[:length].isascii()


def answer_all(loaded: Loaded, asked: Sequence[Question | Plain]) -> Sequence[Answer | bytes | NotFinite]:
    """`answer`, in order, of one pass, where plain ones get the bytes of their replies.

    One of them that is answered by no number leaves none of them answered.
    """
    plain = [one for one in asked if isinstance(one, Plain)]
    if not plain:
        return answer(loaded, [one for one in asked if isinstance(one, Question)])
    form = plain[0].form
    if len(plain) == len(asked):
        try:
            return form.answer(loaded, plain)
        except FloatingPointError:
            return [NotFinite()] * len(plain)
    others = [one for one in asked if isinstance(one, Question)]
    crowd, *rest = answer(loaded, [Question(observation=form.observation(plain), rows=len(plain)), *others])
    replies: Sequence[bytes | NotFinite] = (
        [crowd] * len(plain)
        if isinstance(crowd, NotFinite)
        else (form.replies(plain, crowd.ready, crowd.log_prob))
    )
    of_plain, of_others = iter(replies), iter(rest)
    return [next(of_plain if isinstance(one, Plain) else of_others) for one in asked]
