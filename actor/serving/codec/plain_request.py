"""Requests of one observation and nothing else, as most of a stream are: read without making a message.

    policy │ request id │ path, dtype and shape │ observation │ …

Such a request is recognised by the bytes that protobuf writes around the observation. One that says more, is
written in another order or holds numbers that are not finite is not plain: it is read as a message, which
says what is wrong with it.
"""

import struct
from typing import Final

import numpy as np

from penstock.actor.serving.codec.arrays import Layout
from penstock.actor.serving.codec.replies import before
from penstock.actor.serving.inference.forward_pass import Question
from penstock.protocol.ranges import observed
from penstock.protocol.spaces import Box, Leaf, Space, leaves, zeros
from penstock.protocol.tensor import DTYPES, FEW, Array
from penstock.v1 import policy_pb2 as pb

_ID: Final = pb.ActRequest(request_id="?").SerializeToString()[0]
"""The byte in front of an id and its length."""
_FORMATS: Final = {"float16": "e", "float32": "f", "float64": "d"}


class PlainRequests:
    """How plain requests of one observation space are written."""

    def __init__(self, policy: str, space: Space) -> None:
        """Prepare for one policy and observation space.

        policy: name of the one that is served.
        No request is plain where a leaf has a range that is checked.
        """
        self._policy = pb.ActRequest(policy=policy).SerializeToString()
        every = list(leaves(space, "observation"))
        parts = Layout("observation", space).write({name: zeros(leaf, (1,)) for name, leaf in every}, 0)
        self._length = len(pb.ActRequest(observation=parts).SerializeToString())
        self._leaves: list[_Leaf] = []
        at = -self._length
        for (name, leaf), part in zip(every, parts, strict=True):
            self._leaves.append(_Leaf(name, leaf, part, at))
            at = self._leaves[-1].end
        self._has_any = all(leaf.is_free for leaf in self._leaves)

    def read(self, data: bytes) -> Question | None:
        """The question of a plain request; None for bytes that are none."""
        bare = data.removeprefix(self._policy)
        lead = len(bare) - self._length
        if not self._has_any or lead < 0 or (lead and not _is_id(bare, lead)):
            return None
        observation = {}
        for leaf in self._leaves:
            if not leaf.fits(data):
                return None
            observation[leaf.name] = leaf.row(data)
        return Question(observation=observation, rows=1, request_id=bare[2:lead].decode() if lead else "")


class _Leaf:
    """One leaf of the observation. Places are counted from the end of a request.

    is_free: any number will do; of reals those that are not too far from 0.
    """

    def __init__(self, name: str, leaf: Leaf, part: pb.Part, begin: int) -> None:
        size = len(part.value.data)
        self.name, self._before = name, before(pb.ActRequest(observation=[part]), part.value.data)
        self._begin, self._at = begin, begin + len(self._before)
        self.end = self._at + size
        self._dtype, self._shape = DTYPES[leaf.dtype], (1, *leaf.shape)
        self._is_real, known = leaf.dtype in _FORMATS, observed(leaf)
        self._most = 0.0 if known is None else float(np.min(known.high))
        is_any = self._is_real or known is None
        self.is_free = isinstance(leaf, Box) and leaf.dtype != "bool" and size > 0 and is_any
        count = size // self._dtype.itemsize
        few = f"<{count}{_FORMATS[leaf.dtype]}" if self._is_real and count <= FEW else ""
        self._unpack = struct.Struct(few).unpack_from if few else None

    def fits(self, data: bytes) -> bool:
        """Return whether a request holds numbers that the leaf's range has; in doubt not."""
        if data[self._begin : self._at] != self._before:
            return False
        if self._unpack is not None:
            # NaN is in no order, so its sum is not below the limit either.
            return bool(sum(map(abs, self._unpack(data, self._at))) <= self._most)
        return not self._is_real or bool(np.abs(self.row(data)).max() <= self._most)

    def row(self, data: bytes) -> Array:
        """The observation of a request that fits, [1, *shape]."""
        return np.frombuffer(data[self._at : self.end or None], self._dtype).reshape(self._shape)


def _is_id(data: bytes, length: int) -> bool:
    """Return whether so many bytes are a request id, of at most 127 characters that are a byte each."""
    return length > 2 and data[0] == _ID and data[1] == length - 2 and data[:length].isascii()
