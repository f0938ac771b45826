"""Spaces as data: what an observation or an action may be, without Gymnasium.

A space is a tree; its leaves are the tensors of a fragment. A leaf's path is "" for a bare leaf and
the keys (or positions) joined by "/" otherwise, so the tensor names are `observation`,
`observation/camera`, `action/0`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.protocol.tensor import Array, check_dtype, from_tensor, to_tensor
from penstock.v1 import tensor_pb2 as pb

MAX_DEPTH = 8
_UNBOUNDED = 3.0
"""Stands in for a bound that is infinite or astronomically far."""


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Real or integer array within bounds; `low` and `high` share dtype and shape."""

    low: Array
    high: Array

    def __post_init__(self) -> None:
        check_dtype("Box", self.low.dtype.name)
        if self.low.shape != self.high.shape or self.low.dtype != self.high.dtype:
            raise ValueError(
                f"Box: low is {self.low.dtype}{self.low.shape}, high is {self.high.dtype}{self.high.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def dtype(self) -> str:
        return self.low.dtype.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and to_proto(self) == to_proto(other)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        low = self.low.min() if self.low.size else 0
        high = self.high.max() if self.high.size else 0
        return f"Box({low:g}..{high:g}, {self.shape}, {self.dtype})"


@dataclass(frozen=True, slots=True)
class Discrete:
    """One integer in [start, start + n)."""

    n: int
    start: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "int64"


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """Independent integers, the i-th in [0, nvec[i])."""

    nvec: tuple[int, ...]
    dtype: str = "int64"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)


@dataclass(frozen=True, slots=True)
class MultiBinary:
    """Independent bits."""

    n: int
    dtype: str = "int8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)


@dataclass(frozen=True, slots=True)
class Dict:
    """Named parts in the order of their keys."""

    spaces: tuple[tuple[str, "Space"], ...]


@dataclass(frozen=True, slots=True)
class Tuple:
    """Parts in order."""

    spaces: tuple["Space", ...]


Leaf = Box | Discrete | MultiDiscrete | MultiBinary
Space = Leaf | Dict | Tuple


def parts(space: Dict | Tuple) -> tuple[tuple[str, Space], ...]:
    if isinstance(space, Dict):
        return space.spaces
    return tuple((str(index), part) for index, part in enumerate(space.spaces))


def leaves(space: Space, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Return path and space of every leaf, depth first; the path of a bare leaf is `path` itself."""
    if not isinstance(space, Dict | Tuple):
        yield path, space
        return
    for name, part in parts(space):
        yield from leaves(part, f"{path}/{name}" if path else name)


def flatten(space: Space, value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaf values by path, such as {"observation/camera": …} for path "observation"."""
    if not isinstance(space, Dict | Tuple):
        return {path: value}
    result: dict[str, Any] = {}
    for index, (name, part) in enumerate(parts(space)):
        inner = value[name] if isinstance(space, Dict) else value[index]
        result |= flatten(part, inner, f"{path}/{name}" if path else name)
    return result


def unflatten(space: Space, values: Mapping[str, Any], path: str = "") -> Any:
    """Return the nested value that `flatten` took apart."""
    if not isinstance(space, Dict | Tuple):
        return values[path]
    inner = {name: unflatten(part, values, f"{path}/{name}" if path else name) for name, part in parts(space)}
    return inner if isinstance(space, Dict) else tuple(inner.values())


def to_proto(space: Space) -> pb.Space:
    match space:
        case Box():
            return pb.Space(box=pb.Space.Box(low=to_tensor(space.low), high=to_tensor(space.high)))
        case Discrete():
            return pb.Space(discrete=pb.Space.Discrete(n=space.n, start=space.start))
        case MultiDiscrete():
            return pb.Space(multi_discrete=pb.Space.MultiDiscrete(nvec=space.nvec))
        case MultiBinary():
            return pb.Space(multi_binary=pb.Space.MultiBinary(n=space.n))
        case Dict():
            keys, inner = zip(*space.spaces, strict=True) if space.spaces else ((), ())
            return pb.Space(dict=pb.Space.Dict(keys=keys, spaces=map(to_proto, inner)))
        case Tuple():
            return pb.Space(tuple=pb.Space.Tuple(spaces=map(to_proto, space.spaces)))


def from_proto(field: str, message: pb.Space, depth: int = 0) -> Space:
    """Return the space of a message; raises ValueError that names `field` when it is none of the kinds."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{field}: a space nests deeper than {MAX_DEPTH}")
    kind = message.WhichOneof("kind")
    match kind:
        case "box":
            low, high = message.box.low, message.box.high
            return Box(from_tensor(f"{field}.low", low).copy(), from_tensor(f"{field}.high", high).copy())
        case "discrete":
            if message.discrete.n < 1:
                raise ValueError(f"{field}: Discrete(n=0) has no value")
            return Discrete(message.discrete.n, message.discrete.start)
        case "multi_discrete":
            return MultiDiscrete(tuple(message.multi_discrete.nvec))
        case "multi_binary":
            return MultiBinary(message.multi_binary.n)
        case "dict":
            keys, spaces = message.dict.keys, message.dict.spaces
            if len(keys) != len(spaces):
                raise ValueError(f"{field}: {len(keys)} keys for {len(spaces)} spaces")
            return Dict(
                tuple(
                    (key, from_proto(f"{field}/{key}", part, depth + 1))
                    for key, part in zip(keys, spaces, strict=True)
                )
            )
        case "tuple":
            return Tuple(
                tuple(
                    from_proto(f"{field}/{index}", part, depth + 1)
                    for index, part in enumerate(message.tuple.spaces)
                )
            )
        case _:
            raise ValueError(f"{field}: the space has no kind")


def zeros(leaf: Leaf, leading: tuple[int, ...] = ()) -> Array:
    return np.zeros((*leading, *leaf.shape), np.dtype(leaf.dtype))


def sample(leaf: Leaf, rows: int, random: "np.random.Generator") -> Array:
    """Return values drawn within the leaf's bounds, [rows, *shape]."""
    shape = (rows, *leaf.shape)
    match leaf:
        case Box():
            low = np.clip(leaf.low.astype(np.float64), -_UNBOUNDED, None)
            high = np.clip(leaf.high.astype(np.float64), None, np.maximum(_UNBOUNDED, low))
            if np.issubdtype(leaf.low.dtype, np.integer):
                low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)
            return random.uniform(low, np.maximum(low, high), shape).astype(leaf.dtype)
        case Discrete():
            return (leaf.start + random.integers(leaf.n, size=shape)).astype(leaf.dtype)
        case MultiDiscrete():
            return random.integers(np.asarray(leaf.nvec), size=shape).astype(leaf.dtype)
        case MultiBinary():
            return random.integers(2, size=shape).astype(leaf.dtype)
