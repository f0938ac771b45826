"""From raw observations to features: the reader of observations, and the hidden layers.

`Reader` turns observation tensors into `Inputs` (no parameters but the normaliser); a `Body` turns
`Inputs` into features. Axes: M = any number of rows, D = width of the vector part, F = features.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.config.settings import PolicySection
from penstock.policy.acting.array_policy import (
    VARIANCE_FLOOR,
    InputLayout,
    byte_scale,
    is_coarse,
    vector_width,
)
from penstock.policy.recurrent import Unroll
from penstock.protocol.schema import choices
from penstock.protocol.spaces import Discrete, Leaf, MultiDiscrete, Space, leaves

# ---- Running mean and variance of observations: part of the weights, frozen while an update runs.


_FARTHEST = 100.0
"""Standard deviations from the mean to which observations are clipped in the statistics: otherwise one
fragment could widen them for the rest of the run, and normalised observations would hardly differ."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of n rows: count float64 [], mean float64 [D], spread float64 [D] = Σ (x − mean)²."""

    count: Tensor
    mean: Tensor
    spread: Tensor

    def checksum(self) -> Tensor:
        """Return a scalar on the device that is finite exactly when all moments are."""
        return self.mean.sum() + self.spread.sum()


def moments(rows: Tensor) -> Moments:
    """Return the moments of rows [n, D]; all are 0 when n is 0."""
    wide = rows.double()
    mean = wide.sum(0).div_(max(1, len(rows)))
    count = torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device)
    return Moments(count, mean, (wide - mean).square().sum(0))


def combine(first: Moments, second: Moments) -> Moments:
    """Return the moments of the rows of `first` and `second` together (Chan, Golub, LeVeque 1979)."""
    count = first.count + second.count
    delta = second.mean - first.mean
    weight = second.count / count.clamp(min=1.0)
    spread = first.spread + second.spread + delta.square() * first.count * weight
    return Moments(count, first.mean + delta * weight, spread)


class Normaliser(nn.Module):
    """Computes (x − mean)/√var, clipped. Buffers: count [], mean [D], variance [D], all float64.

    Statistics are combined exactly: any grouping of the same steps gives the same result, as long as no
    observation is clipped. Before the first merge they are mean 0 and variance 1.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        scale = (self.variance + VARIANCE_FLOOR).rsqrt().to(rows.dtype)
        return ((rows - self.mean.to(rows.dtype)) * scale).clamp(-self.clip, self.clip)

    def observe(self, rows: Tensor) -> Moments:
        """Return the moments of raw rows [n, D], clipped at `_FARTHEST` standard deviations."""
        wide = rows.double()
        reach = _FARTHEST * (self.variance + VARIANCE_FLOOR).sqrt()
        near = wide.clamp(self.mean - reach, self.mean + reach)
        return moments(torch.where(wide.isfinite() & (self.count > 0), near, wide))

    def merge(self, new: Moments) -> None:
        old = Moments(self.count, self.mean, self.variance * self.count)
        both = combine(old, new)
        self.count.copy_(both.count)
        self.mean.copy_(both.mean)
        self.variance.copy_(both.spread / both.count.clamp(min=1.0))


# ---- Hidden layers: every forward pass of actor and learner is one in evaluation mode.

_EPSILON = 1e-5
_NEWEST_SHARE = 0.01
"""Least weight of the newest batch in the statistics.

Activations drift as the weights below them change, but no ratio bounds the change that new statistics make
to the policy: with 0.1 none of five seeds solved CartPole, with 0.03 two did.
"""


class BatchNorm(nn.Module):
    """Normalises features (Ioffe and Szegedy 2015) with frozen statistics, then scales and shifts them.

    Parameters: weight, bias [F]. Buffers, part of the weights: merges [], mean [F], variance [F], all
    float64.
    """

    merges: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("merges", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))
        self.measuring: Callable[[Moments], Moments] | None = None
        self.seen: Moments | None = None

    def forward(self, rows: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.measuring is not None:
            self.seen = self.measuring(moments(rows))
            # The next layers are measured with the inputs that they will get.
            mean, variance = self._merged(self.seen)
        scale = (variance + _EPSILON).rsqrt().to(rows.dtype) * self.weight
        return (rows - mean.to(rows.dtype)) * scale + self.bias

    def merge(self, new: Moments) -> None:
        mean, variance = self._merged(new)
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.merges += 1

    def _merged(self, new: Moments) -> tuple[Tensor, Tensor]:
        weight = (1.0 / (self.merges + 1.0)).clamp(min=_NEWEST_SHARE)
        variance = new.spread / new.count
        # The variance of equal rows is no scale: it would amplify the next small change of the weights below
        # 300 times, in every layer.
        merged = self.variance.lerp(variance, weight).where(variance > _EPSILON, self.variance)
        return self.mean.lerp(new.mean, weight), merged


@dataclass(frozen=True, slots=True)
class Measured:
    """Moments of the rows that passed each layer of batch normalisation, not yet merged."""

    seen: tuple[tuple[BatchNorm, Moments], ...]

    def checksum(self) -> Tensor:
        return torch.stack([moments.checksum() for _, moments in self.seen]).sum()

    def merge(self) -> None:
        for layer, seen in self.seen:
            layer.merge(seen)


def measure(
    module: nn.Module, forward: Callable[[], object], whole: Callable[[Moments], Moments] = lambda own: own
) -> Measured | None:
    """Run `forward` without gradients and return the moments of its layers of batch normalisation."""
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    if not layers:
        return None
    for layer in layers:
        layer.measuring = whole
    try:
        with torch.no_grad():
            forward()
        seen = tuple((layer, layer.seen) for layer in layers if layer.seen is not None)
        return Measured(seen) if seen else None
    finally:
        for layer in layers:
            layer.measuring, layer.seen = None, None


class Dropout(nn.Module):
    """Zeroes features with probability `rate` and scales the others up, inside `thinned` only."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.random: torch.Generator | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.random is None:
            return rows
        kept = torch.empty_like(rows).bernoulli_(1.0 - self.rate, generator=self.random)
        return rows * kept.div_(1.0 - self.rate)


def dropouts(module: nn.Module) -> tuple[Dropout, ...]:
    return tuple(layer for layer in module.modules() if isinstance(layer, Dropout))


@contextmanager
def thinned(layers: Sequence[Dropout], seed: int, device: torch.device) -> Iterator[None]:
    """Drop features in the forward passes inside the block; equal seeds drop the same ones."""
    random = torch.Generator(device).manual_seed(seed)
    for layer in layers:
        layer.random = random
    try:
        yield
    finally:
        for layer in layers:
            layer.random = None


# ---- Convolutional trunks: a uint8 image in, features out; `policy.image_trunk` chooses one.

FEATURES: Final = {"nature": 512, "small": 512, "impala": 256}
SMALLEST: Final = {"nature": 36, "small": 1, "impala": 8}
"""Least pixels of the shorter side; of fewer, impala's three poolings would leave one."""
_IMPALA_CHANNELS: Final = (16, 32, 32)


class ImageEncoder(nn.Module):
    """The trunk of one image, with its last linear layer."""

    def __init__(self, path: str, leaf: Leaf, trunk: str, axes: str = "auto") -> None:
        """trunk, axes: `policy.image_trunk` and `policy.image_axes`."""
        super().__init__()
        shape = leaf.shape
        self.rank, self.scale = len(shape), byte_scale(leaf)
        self.channels_first = self.rank == 3 and _has_channels_first(shape, axes)
        channels, *size = _planes(shape, channels_first=self.channels_first)
        name = _chosen(path, leaf, trunk, min(size))
        convolutions = nn.Sequential(*_CONVOLUTIONS[name](channels), nn.Flatten())
        with torch.no_grad():
            flat = convolutions(torch.zeros(1, channels, *size)).shape[1]
        self.width = FEATURES[name]
        self.layers = nn.Sequential(*convolutions, nn.Linear(flat, self.width), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        rows = image.unsqueeze(-1) if self.rank == 2 else image
        planes = rows if self.channels_first else rows.permute(0, 3, 1, 2)
        features: Tensor = self.layers(planes.to(next(self.parameters()).dtype) / self.scale)
        return features


def _has_channels_first(shape: tuple[int, ...], axes: str) -> bool:
    """Return whether the first of three axes is that of the channels: height and width differ least."""
    if axes != "auto":
        return axes == "channels_first"
    before, after = (abs(math.log(one / other)) for one, other in pairwise(shape))
    return after < before or (after == before and shape[0] < shape[-1])


def _planes(shape: tuple[int, ...], *, channels_first: bool) -> tuple[int, int, int]:
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return (shape[0], shape[1], shape[2]) if channels_first else (shape[2], shape[0], shape[1])


def _chosen(path: str, leaf: Leaf, trunk: str, pixels: int) -> str:
    if trunk == "auto":
        return "nature" if pixels >= SMALLEST["nature"] else "small"
    if pixels < SMALLEST[trunk]:
        fitting = "auto, small or impala" if pixels >= SMALLEST["impala"] else "auto or small"
        raise ValueError(
            f"observation_space at {path!r}: {leaf!r} is too small for policy.image_trunk={trunk!r}, which "
            f"takes {SMALLEST[trunk]} pixels and more; use {fitting}"
        )
    return trunk


def _nature(channels: int) -> list[nn.Module]:
    sizes = ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
    return [layer for size in sizes for layer in (nn.Conv2d(*size), nn.ReLU())]


def _small(channels: int) -> list[nn.Module]:
    sizes = ((channels, 32, 3, 2, 1), (32, 64, 3, 2, 1))
    return [layer for size in sizes for layer in (nn.Conv2d(*size), nn.ReLU())]


def _impala(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for after in _IMPALA_CHANNELS:
        layers += [nn.Conv2d(channels, after, 3, 1, 1), nn.MaxPool2d(3, 2, 1)]
        layers += [ResidualBlock(after), ResidualBlock(after)]
        channels = after
    return [*layers, nn.ReLU()]


_CONVOLUTIONS: Final = {"nature": _nature, "small": _small, "impala": _impala}


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), initially the identity: six blocks would multiply the variance."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, 1, 1)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, planes: Tensor) -> Tensor:
        inner: Tensor = self.second(functional.relu(self.first(functional.relu(planes))))
        return planes + inner


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}

NORMALISATIONS: dict[str, type[nn.LayerNorm | BatchNorm]] = {"layer": nn.LayerNorm, "batch": BatchNorm}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a network for M rows.

    vector: [M, D] in the policy's dtype.
    images: [M, *shape] each, raw uint8.
    forbidden: bool [m, P], outputs of the policy that an action mask rules out; None: none.
    time: how the rows follow one another, for a policy with a recurrent core.
    wanted: int64 [m], rows whose outputs are wanted; None: all.
    """

    vector: Tensor
    images: tuple[Tensor, ...] = ()
    forbidden: Tensor | None = None
    time: Unroll | None = None
    wanted: Tensor | None = None

    def select(self, index: Tensor) -> "Inputs":
        if self.time is not None:
            raise ValueError("inputs: rows of a recurrent policy are taken by whole sequences, not alone")
        images = tuple(image.index_select(0, index) for image in self.images)
        forbidden = None if self.forbidden is None else self.forbidden.index_select(0, index)
        return Inputs(self.vector.index_select(0, index), images, forbidden)

    def narrow(self, start: int, length: int) -> "Inputs":
        """Return rows [start, start + length), as views, of rows without time."""
        rows = slice(start, start + length)
        images = tuple(image[rows] for image in self.images)
        return Inputs(self.vector[rows], images, None if self.forbidden is None else self.forbidden[rows])


class Reader(InputLayout, nn.Module):
    """Converts observations to `Inputs`.

    Real numbers are normalised where `policy.normalise_observations` is set; see `InputLayout`.
    """

    def __init__(self, space: Space, section: PolicySection) -> None:
        nn.Module.__init__(self)
        InputLayout.__init__(self, space)
        self.space = space
        wanted = section.normalise_observations and self.reals_width > 0
        self.normaliser = Normaliser(self.reals_width, section.observation_clip) if wanted else None

    def raw_reals(self, observation: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the Box leaves side by side, [M, reals_width], not normalised."""
        columns = []
        for path, leaf in self.reals:
            column = observation[path].reshape(-1, vector_width(leaf)).to(dtype)
            columns.append(column / byte_scale(leaf) if leaf.dtype == "uint8" else column)
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def read(self, observation: Mapping[str, Tensor], dtype: torch.dtype) -> Inputs:
        """Return inputs of observations [..., *shape], leading axes flattened to M rows."""
        columns = []
        if self.reals:
            # What float32 would round is centred before.
            is_wide = self.normaliser is not None and any(is_coarse(leaf) for _, leaf in self.reals)
            reals = self.raw_reals(observation, torch.float64 if is_wide else dtype)
            columns.append(reals if self.normaliser is None else self.normaliser(reals).to(dtype))
        columns += [codes(observation[path], leaf).to(dtype) for path, leaf in self.codes]
        images = tuple(observation[path].reshape(-1, *leaf.shape) for path, leaf in self.images)
        if not columns:
            return Inputs(torch.empty((len(images[0]), 0), dtype=dtype, device=images[0].device), images)
        return Inputs(columns[0] if len(columns) == 1 else torch.cat(columns, 1), images)


def codes(value: Tensor, leaf: Leaf) -> Tensor:
    match leaf:
        case Discrete():
            return functional.one_hot(value.reshape(-1).long() - leaf.start, leaf.n)
        case MultiDiscrete():
            rows = value.reshape(-1, len(leaf.nvec)).long()
            return torch.cat([functional.one_hot(rows[:, i], n) for i, n in enumerate(leaf.nvec)], 1)
        case _:
            return value.reshape(-1, vector_width(leaf))


class Body(nn.Module):
    """One encoder per image, their features concatenated with the vector part, then the hidden layers.

    A hidden layer is linear → normalisation → non-linearity → dropout; normalisation and dropout are
    optional. width: F, the number of returned features. extra: number of further input features, appended.
    """

    def __init__(self, reader: Reader, section: PolicySection, *, extra: int = 0) -> None:
        super().__init__()
        encoders = [
            ImageEncoder(path, leaf, section.image_trunk, section.image_axes) for path, leaf in reader.images
        ]
        self.images = nn.ModuleList(encoders)
        self.width = reader.width + sum(encoder.width for encoder in encoders) + extra
        layers: list[nn.Module] = []
        for size in section.hidden_sizes:
            layers += _hidden_layer(self.width, size, section)
            self.width = size
        self.layers = nn.Sequential(*layers)

    @property
    def chain(self) -> Sequence[nn.Module] | None:
        """Return the layers in order where the network is a chain, else None."""
        return None if self.images else tuple(self.layers)

    def forward(self, inputs: Inputs) -> Tensor:
        joined = inputs.vector
        if self.images:
            seen = [encoder(image) for encoder, image in zip(self.images, inputs.images, strict=True)]
            joined = torch.cat([inputs.vector, *seen], 1)
        features: Tensor = self.layers(joined)
        return features


def _hidden_layer(before: int, after: int, section: PolicySection) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(before, after)]
    if section.hidden_norm != "none":
        layers.append(NORMALISATIONS[section.hidden_norm](after))
    layers.append(ACTIVATIONS[section.activation]())
    if section.dropout > 0:
        layers.append(Dropout(section.dropout))
    return layers


def initialise(module: nn.Module, gain: float | None, generator: torch.Generator) -> None:
    """Set the first weights and zero biases of every linear and convolutional layer of a module.

    Residual blocks begin as identities. gain: factor of orthogonal weights; None: uniform weights between
    ±√(6 / (inputs + outputs)) instead (Glorot and Bengio 2010). generator: draws them.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            if gain is None:
                nn.init.xavier_uniform_(layer.weight, generator=generator)
            else:
                nn.init.orthogonal_(layer.weight, gain, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    for block in module.modules():
        if isinstance(block, ResidualBlock):
            nn.init.zeros_(block.second.weight)


# ---- Action masks.


class ActionMasks:
    """Masks of an action space. cuts: of each leaf, its part of the P outputs."""

    def __init__(self, action_space: Space, cuts: Sequence[slice]) -> None:
        parts = zip(leaves(action_space, "action"), cuts, strict=True)
        self._parts = [(path, f"mask/{path}", cut) for (path, leaf), cut in parts if choices(leaf)]
        self._width = cuts[-1].stop

    def given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {path: row[name] for path, name, _ in self._parts if name in row}

    def forbidden(self, observation: Mapping[str, Tensor], rows: Tensor) -> Tensor | None:
        """Return which outputs the masks [..., n] forbid, bool [M = len(rows), P]; None without masks."""
        given = self.given(observation)
        if not given:
            return None
        forbidden = torch.zeros((len(rows), self._width), dtype=torch.bool, device=rows.device)
        for path, _, cut in self._parts:
            if path in given:
                allowed = given[path].reshape(-1, cut.stop - cut.start)
                forbidden[: len(allowed), cut] = ~allowed
        return forbidden


def masked(parameters: Tensor, forbidden: Tensor | None) -> Tensor:
    """Return parameters [M, P] with probability 0 for what is `forbidden`, bool [M, P].

    Forbidden logits become the lowest finite number: with minus infinity log-probability, entropy and their
    gradients would not be finite.
    """
    if forbidden is None:
        return parameters
    return parameters.masked_fill(forbidden, torch.finfo(parameters.dtype).min)
