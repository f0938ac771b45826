"""The parts of an observation space as a network reads them: images, real numbers and codes."""

import math
from itertools import accumulate
from typing import Final

from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, leaves

IMAGE_RANKS = (2, 3)
MOST_CODES: Final = 2**20
"""Most columns of one leaf's codes: each is an input or an output of a network, in every row of a batch."""


def is_image(leaf: Leaf) -> bool:
    """Return whether a leaf is a uint8 Box of rank 2 or 3."""
    return isinstance(leaf, Box) and leaf.dtype == "uint8" and len(leaf.shape) in IMAGE_RANKS


def vector_width(leaf: Leaf) -> int:
    """Return the number of elements of the vector part that a leaf takes."""
    match leaf:
        case Box():
            return math.prod(leaf.shape)
        case Discrete():
            return leaf.n
        case MultiDiscrete():
            return sum(leaf.nvec)
        case MultiBinary():
            return leaf.n


class InputLayout:
    """Each leaf is real numbers, one-hot codes or bits, or an image.

    The vector part is the Box leaves in order, then the others in order. Raises ValueError that names path
    and space of a leaf that cannot be read, or says that there is none.

    images, reals, codes: path and leaf of each.
    reals_width, width: columns of the real numbers, and of the whole vector part.
    """

    def __init__(self, space: Space) -> None:
        every = list(leaves(space, "observation"))
        if not every:
            raise ValueError(f"observation_space={space!r}: holds nothing; a policy must see something")
        for path, leaf in every:
            _check_observation(path, leaf)
        self.images = [(path, leaf) for path, leaf in every if is_image(leaf)]
        plain = [(path, leaf) for path, leaf in every if not is_image(leaf)]
        self.reals = [(path, leaf) for path, leaf in plain if isinstance(leaf, Box)]
        self.codes = [(path, leaf) for path, leaf in plain if not isinstance(leaf, Box)]
        self.reals_width = sum(vector_width(leaf) for _, leaf in self.reals)
        self.width = self.reals_width + sum(vector_width(leaf) for _, leaf in self.codes)

    @property
    def columns(self) -> dict[str, slice]:
        """Return the columns of each part of the vector, by path. Images are not among them."""
        parts = [*self.reals, *self.codes]
        ends = list(accumulate(vector_width(leaf) for _, leaf in parts))
        cuts = zip(parts, [0, *ends], ends, strict=False)
        return {path: slice(start, end) for (path, _), start, end in cuts}


def _check_observation(path: str, leaf: Leaf) -> None:
    if isinstance(leaf, Box) and math.prod(leaf.shape) == 0:
        raise ValueError(
            f"observation_space at {path!r}: {leaf!r} is empty; "
            "a policy reads Box (images: uint8 of rank 2 or 3), Discrete, MultiDiscrete, MultiBinary, "
            "and Dict or Tuple of them"
        )
    check_codes(f"observation_space at {path!r}", leaf)


def check_codes(name: str, leaf: Leaf) -> None:
    """Raise ValueError that begins with `name` where a leaf other than a Box has too many codes."""
    if not isinstance(leaf, Box) and vector_width(leaf) > MOST_CODES:
        raise ValueError(
            f"{name}: {leaf!r} has {vector_width(leaf)} codes, a network takes {MOST_CODES} at most; "
            "give it in several parts (MultiDiscrete, such as the digits of a number), or as a Box"
        )
