"""A policy in numpy alone, for chains of linear layers: equal seeds draw as in `penstock.policy.policy`."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from penstock.config.settings import PolicySection
from penstock.policy.acting import drawing
from penstock.policy.acting.acting_policy import ActingPolicy, Step
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, leaves
from penstock.protocol.tensor import Array

# ---- A blob of weights: safetensors, SHA-256, and a strict way back; no pickle.
#
# A blob comes from outside: its header is bounded, and its names, shapes and dtypes must be exactly the
# expected ones.

MAX_HEADER_BYTES: Final = 256 * 1024
"""Most bytes of a header: names, dtypes and shapes of some two thousand tensors.

The adapter of a model of 80 layers has as many. A header is parsed before any other check.
"""

Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def decode(blob: bytes) -> dict[str, Array]:
    """Return the arrays by name; raises ValueError unless it is a complete blob with a bounded header."""
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > MAX_HEADER_BYTES:
        raise ValueError(
            f"weights: {len(blob)} bytes with a header of {size}; at most {MAX_HEADER_BYTES} are allowed"
        )
    try:
        arrays: dict[str, Array] = load_arrays(blob)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"weights: not a whole safetensors blob: {error}") from error
    return arrays


def fitting(blob: bytes, forms: Mapping[str, Form]) -> dict[str, Array]:
    """Return the arrays of a blob by name; raises ValueError that names a tensor of another form."""
    arrays = decode(blob)
    if arrays.keys() != forms.keys():
        missing, unknown = sorted(forms.keys() - arrays.keys()), sorted(arrays.keys() - forms.keys())
        raise ValueError(f"weights: missing {missing[:8]}, unknown {unknown[:8]}; is it the same policy?")
    for name, array in arrays.items():
        dtype, shape = forms[name]
        if (array.dtype.name, array.shape) != (dtype, shape):
            raise ValueError(
                f"weights.{name}: {array.dtype.name}{array.shape} does not fit {dtype}{shape}; "
                "is it the same policy?"
            )
    return arrays


# ---- The input of a network: images, real numbers and codes of an observation space.

IMAGE_RANKS = (2, 3)
MOST_CODES: Final = 2**20
"""Most columns of one leaf's codes, each an input or output of a network in every row of a batch."""


def is_image(leaf: Leaf) -> bool:
    return isinstance(leaf, Box) and leaf.dtype == "uint8" and len(leaf.shape) in IMAGE_RANKS


def byte_scale(leaf: Leaf) -> int:
    """Return what the elements of a uint8 Box are divided by: the highest that it states, 255 for images."""
    assert isinstance(leaf, Box)
    return int(leaf.high.max()) or 1


def is_coarse(leaf: Leaf) -> bool:
    """Return whether float32 does not hold the numbers of a Box exactly, such as float64 and int32."""
    return not np.can_cast(leaf.dtype, np.float32)


def vector_width(leaf: Leaf) -> int:
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

    The vector part, of `width` columns, has the Box leaves in order, then the others in order. Raises
    ValueError that names path and space of an unsupported leaf, and for an empty space.
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
        """Return the columns of each part of the vector, by path, without images."""
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
    if not isinstance(leaf, Box) and vector_width(leaf) > MOST_CODES:
        raise ValueError(
            f"{name}: {leaf!r} has {vector_width(leaf)} codes, a network takes {MOST_CODES} at most; "
            "give it in several parts (MultiDiscrete, such as the digits of a number), or as a Box"
        )


# ---- The actor's forward pass in numpy: twice as fast as torch for small networks and few rows.

VARIANCE_FLOOR: Final = 1e-8

Activation = Callable[[drawing.Reals], drawing.Reals]
Linear = tuple[drawing.Reals, drawing.Reals]
"""Weights [before, after] and biases [after] of a layer."""


def _tanh(rows: drawing.Reals) -> drawing.Reals:
    np.tanh(rows, out=rows)
    return rows


def _relu(rows: drawing.Reals) -> drawing.Reals:
    return np.maximum(rows, 0, out=rows)


def _elu(rows: drawing.Reals) -> drawing.Reals:
    return np.where(rows > 0, rows, np.expm1(np.minimum(rows, 0)))


def _silu(rows: drawing.Reals) -> drawing.Reals:
    return cast("drawing.Reals", rows / (1 + np.exp(-rows)))


ACTIVATIONS: Final[dict[str, Activation]] = {"tanh": _tanh, "relu": _relu, "elu": _elu, "silu": _silu}
"""By `policy.activation`; they may modify their argument."""


class NumpyNormaliser:
    """Computes (x − mean)/√var, clipped, with the same rounding as `penstock.policy.networks`.

    mean, variance: float64 [D]; read at every call, so that updates in place have an effect.
    """

    def __init__(self, mean: NDArray[np.float64], variance: NDArray[np.float64], clip: float) -> None:
        self._mean, self._variance, self._clip = mean, variance, clip

    def __call__(self, rows: drawing.Reals) -> drawing.Reals:
        """Normalise rows [N, D], in their dtype."""
        scale = 1.0 / np.sqrt(self._variance + VARIANCE_FLOOR)
        centred: drawing.Reals = rows - self._mean.astype(rows.dtype)
        centred *= scale.astype(rows.dtype)
        np.maximum(centred, -self._clip, out=centred)
        return np.minimum(centred, self._clip, out=centred)


class NumpyForward:
    """Reads observations [N, *shape] and runs a chain of layers over them.

    layout: of an observation space without images. normaliser: of the real numbers, or None. layers: linear
    layers, whose arrays are read at every call, and activations.
    """

    def __init__(
        self, layout: InputLayout, normaliser: NumpyNormaliser | None, layers: Sequence[Linear | Activation]
    ) -> None:
        # Reading the dtype of a space is slower than reading a column.
        self._reals = [
            (path, byte_scale(leaf) if leaf.dtype == "uint8" else None) for path, leaf in layout.reals
        ]
        self._codes = layout.codes
        self._normaliser = normaliser
        self._layers = tuple(layers)
        self._dtype = next(layer[0].dtype for layer in layers if isinstance(layer, tuple))
        is_wide = normaliser is not None and any(is_coarse(leaf) for _, leaf in layout.reals)
        self._read_as = np.dtype(np.float64) if is_wide else self._dtype

    def __call__(self, observation: Mapping[str, Array]) -> drawing.Reals:
        rows = self._read(observation)
        for layer in self._layers:
            if isinstance(layer, tuple):
                # `@` is half a microsecond slower, as much as half of a small layer.
                rows = rows.dot(layer[0])
                rows += layer[1]
            else:
                rows = layer(rows)
        return rows

    def _read(self, observation: Mapping[str, Array]) -> drawing.Reals:
        columns = [self._column(observation[path], scale) for path, scale in self._reals]
        if columns and self._normaliser is not None:
            columns = [self._normaliser(_side_by_side(columns)).astype(self._dtype, copy=False)]
        columns += [_codes(path, observation[path], leaf, self._dtype) for path, leaf in self._codes]
        return _side_by_side(columns)

    def _column(self, value: Array, scale: int | None) -> drawing.Reals:
        column: drawing.Reals = value.reshape(len(value), -1).astype(self._read_as, copy=False)
        return column if scale is None else column / column.dtype.type(scale)


def _side_by_side(columns: Sequence[drawing.Reals]) -> drawing.Reals:
    return columns[0] if len(columns) == 1 else np.concatenate(columns, 1)


def _codes(path: str, value: Array, leaf: Leaf, dtype: "np.dtype[np.floating]") -> drawing.Reals:
    match leaf:
        case Discrete():
            return _one_hot(path, value.reshape(-1).astype(np.int64) - leaf.start, leaf.n, dtype)
        case MultiDiscrete():
            columns = value.reshape(-1, len(leaf.nvec)).T.astype(np.int64)
            parts = zip(columns, leaf.nvec, strict=True)
            return np.concatenate([_one_hot(path, column, n, dtype) for column, n in parts], 1)
        case _:
            return value.reshape(-1, vector_width(leaf)).astype(dtype)


def _one_hot(
    path: str, index: NDArray[np.int64], count: int, dtype: "np.dtype[np.floating]"
) -> drawing.Reals:
    if not ((index >= 0) & (index < count)).all():
        raise ValueError(f"{path}: holds numbers that are not in its space of {count}")
    codes: drawing.Reals = np.zeros((len(index), count), dtype)
    codes[np.arange(len(index)), index] = 1
    return codes


# ---- The distribution of each leaf of the action space.

H = TypeVar("H", bound=drawing.Drawing)


def kind_of(path: str, leaf: Leaf, section: PolicySection) -> type[drawing.Drawing]:
    """Return the distribution of a leaf; raises ValueError that names an unsupported path and space."""
    check_codes(f"action_space at {path!r}", leaf)
    match leaf:
        case Discrete():
            return (
                drawing.EpsilonGreedyDrawing
                if section.discrete == "epsilon_greedy"
                else drawing.CategoricalDrawing
            )
        case MultiDiscrete():
            return drawing.MultiCategoricalDrawing
        case MultiBinary():
            return drawing.BernoulliDrawing
        case Box():
            return _kind_of_box(path, leaf, section)


def _kind_of_box(path: str, leaf: Box, section: PolicySection) -> type[drawing.Drawing]:
    if not np.issubdtype(np.dtype(leaf.dtype), np.floating) or math.prod(leaf.shape) == 0:
        raise ValueError(
            f"action_space at {path!r}: {leaf!r} cannot be drawn from; "
            "a Box of actions must hold at least one float, use Discrete or MultiDiscrete for integers"
        )
    if section.continuous == "clipped":
        return drawing.GaussianDrawing
    if max(np.abs(leaf.low).max(), np.abs(leaf.high).max()) >= drawing.LARGEST_BOUND:
        raise ValueError(
            f"action_space at {path!r}: {leaf!r} has no finite bounds to squash into; "
            "set policy.continuous=clipped, which PPO can learn with"
        )
    return (
        drawing.ConditionalSquashedGaussianDrawing
        if section.state_dependent_std
        else drawing.SquashedGaussianDrawing
    )


def made(kind: Callable[..., H], path: str, leaf: Leaf, section: PolicySection) -> H:
    """Return the distribution of a leaf, for a Box with its initial log standard deviation."""
    return kind(path, leaf, section.initial_log_std) if isinstance(leaf, Box) else kind(path, leaf)


_NO_STATE: Final[dict[str, Array]] = {}


def is_enough(observation_space: Space, section: PolicySection) -> bool:
    """Return whether a policy of this section is a stateless chain of linear layers, as `ArrayPolicy`."""
    return (
        not section.network
        and not section.kwargs
        and section.hidden_norm == "none"
        and section.recurrent == "none"
        and section.frame_stack == 1
        and not InputLayout(observation_space).images
    )


class ArrayPolicy(ActingPolicy):
    """A policy that acts once its weights are loaded."""

    def __init__(
        self, observation_space: Space, action_space: Space, section: PolicySection, seed: int
    ) -> None:
        heads = [
            made(kind_of(path, leaf, section), path, leaf, section)
            for path, leaf in leaves(action_space, "action")
        ]
        ends = np.cumsum([head.size for head in heads]).tolist()
        cuts = [slice(end - head.size, end) for head, end in zip(heads, ends, strict=True)]
        self._draw_with(action_space, heads, cuts, seed)
        self._layout, self._section = InputLayout(observation_space), section
        self._forms = dict(_forms(self._layout, heads, section))
        self._forward: NumpyForward | None = None

    def initial_state(self, count: int) -> dict[str, Array]:
        """Return {}: the policy is stateless."""
        return {}

    def use_threads(self, count: int) -> None:
        """Do nothing: the environment variables of the process limit numpy's threads."""

    def load(self, blob: bytes) -> None:
        arrays = fitting(blob, self._forms)
        for index, head in enumerate(self._drawings):
            for name, own in head.own_weights().items():
                own[...] = arrays[f"heads.{index}.{name}"]
        self._forward = NumpyForward(self._layout, self._normaliser(arrays), list(self._layers(arrays)))

    def step(self, row: Mapping[str, Array]) -> Step:
        if self._forward is None:
            raise RuntimeError("this policy acts once weights are loaded")
        return Step(self._forward(row), _NO_STATE)

    def _normaliser(self, arrays: Mapping[str, Any]) -> NumpyNormaliser | None:
        if "reader.normaliser.mean" not in arrays:
            return None
        mean, variance = arrays["reader.normaliser.mean"], arrays["reader.normaliser.variance"]
        return NumpyNormaliser(mean, variance, self._section.observation_clip)

    def _layers(self, arrays: Mapping[str, Array]) -> Iterator[Linear | Activation]:
        for name in _hidden_names("actor_body", self._section):
            yield _linear(arrays, name)
            yield ACTIVATIONS[self._section.activation]
        yield _linear(arrays, "actor_head")


def _linear(arrays: Mapping[str, Any], name: str) -> Linear:
    return arrays[f"{name}.weight"].T, arrays[f"{name}.bias"]


def _hidden_names(body: str, section: PolicySection) -> list[str]:
    stride = 3 if section.dropout > 0 else 2
    return [f"{body}.layers.{stride * index}" for index in range(len(section.hidden_sizes))]


def _forms(
    layout: InputLayout, heads: Sequence[drawing.Drawing], section: PolicySection
) -> Iterator[tuple[str, Form]]:
    if section.normalise_observations and layout.reals_width:
        yield "reader.normaliser.count", ("float64", ())
        yield "reader.normaliser.mean", ("float64", (layout.reals_width,))
        yield "reader.normaliser.variance", ("float64", (layout.reals_width,))
    for index, head in enumerate(heads):
        for name, own in head.own_weights().items():
            yield f"heads.{index}.{name}", (own.dtype.name, own.shape)
    for body in ("actor_body",) if section.shared_trunk else ("actor_body", "critic_body"):
        before = layout.width
        for name, after in zip(_hidden_names(body, section), section.hidden_sizes, strict=True):
            yield from _linear_forms(name, before, after)
            before = after
    before = section.hidden_sizes[-1] if section.hidden_sizes else layout.width
    yield from _linear_forms("actor_head", before, sum(head.size for head in heads))
    yield from _linear_forms("critic_head", before, 1)


def _linear_forms(name: str, before: int, after: int) -> Iterator[tuple[str, Form]]:
    yield f"{name}.weight", ("float32", (after, before))
    yield f"{name}.bias", ("float32", (after,))
