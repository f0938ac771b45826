"""From raw observations to features: the reader of observations, and the layers behind it.

`Reader` turns observation tensors into `Inputs` (no parameters but the normaliser); a `Body` turns
`Inputs` into features. Axes: M = any number of rows, D = width of the vector part, F = features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.config.settings import PolicySection
from penstock.policy.acting.input_layout import InputLayout, vector_width
from penstock.policy.layers import BatchNorm, Dropout
from penstock.policy.normaliser import Normaliser
from penstock.policy.recurrent import Unroll
from penstock.policy.trunks import ImageEncoder, ResidualBlock
from penstock.protocol.spaces import Discrete, Leaf, MultiDiscrete, Space

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
        """Return the rows at an int64 index [m].

        Raises ValueError for rows that follow one another in time: they stand for nothing alone.
        """
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


class Reader(nn.Module):
    """Converts observations to `Inputs`.

    Each leaf is real numbers (normalised if asked), one-hot, or an image.

    The vector part is the Box leaves in order, then the others in order.
    """

    def __init__(self, space: Space, section: PolicySection) -> None:
        super().__init__()
        self.space = space
        self.layout = InputLayout(space)
        self.images, self.reals, self.codes = self.layout.images, self.layout.reals, self.layout.codes
        self.reals_width, self.width = self.layout.reals_width, self.layout.width
        wanted = section.normalise_observations and self.reals_width > 0
        self.normaliser = Normaliser(self.reals_width, section.observation_clip) if wanted else None

    @property
    def columns(self) -> dict[str, slice]:
        """Return the columns of each part in `Inputs.vector`, by path.

        Images are not among them; they are listed in `images`.
        """
        return self.layout.columns

    def raw_reals(self, observation: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the Box leaves side by side, [M, reals_width], not normalised.

        Leading axes flattened to M.
        """
        columns = []
        for path, leaf in self.reals:
            column = observation[path].reshape(-1, vector_width(leaf)).to(dtype)
            columns.append(column / 255 if leaf.dtype == "uint8" else column)
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def read(self, observation: Mapping[str, Tensor], dtype: torch.dtype) -> Inputs:
        """Return inputs of observations [..., *shape], leading axes flattened to M rows."""
        columns = []
        if self.reals:
            reals = self.raw_reals(observation, dtype)
            columns.append(reals if self.normaliser is None else self.normaliser(reals))
        columns += [codes(observation[path], leaf).to(dtype) for path, leaf in self.codes]
        images = tuple(observation[path].reshape(-1, *leaf.shape) for path, leaf in self.images)
        if not columns:
            return Inputs(torch.empty((len(images[0]), 0), dtype=dtype, device=images[0].device), images)
        return Inputs(columns[0] if len(columns) == 1 else torch.cat(columns, 1), images)


def codes(value: Tensor, leaf: Leaf) -> Tensor:
    """Return one-hot codes of integers, and bits as they are: [M, vector_width]."""
    match leaf:
        case Discrete():
            return functional.one_hot(value.reshape(-1).long() - leaf.start, leaf.n)
        case MultiDiscrete():
            rows = value.reshape(-1, len(leaf.nvec)).long()
            return torch.cat([functional.one_hot(rows[:, i], n) for i, n in enumerate(leaf.nvec)], 1)
        case _:
            return value.reshape(-1, vector_width(leaf))


class Body(nn.Module):
    """One encoder per image, their features beside the vector part, then the hidden layers.

    A hidden layer is linear → normalisation → non-linearity → dropout, the second and last where asked for.
    width: F, the number of features that it returns.
    """

    def __init__(self, reader: Reader, section: PolicySection) -> None:
        super().__init__()
        encoders = [ImageEncoder(path, leaf, section.image_trunk) for path, leaf in reader.images]
        self.images = nn.ModuleList(encoders)
        self.width = reader.width + sum(encoder.width for encoder in encoders)
        layers: list[nn.Module] = []
        for size in section.hidden_sizes:
            layers += _hidden_layer(self.width, size, section)
            self.width = size
        self.layers = nn.Sequential(*layers)

    @property
    def chain(self) -> Sequence[nn.Module] | None:
        """Return the layers in order where the network is a plain chain, else None."""
        return None if self.images else tuple(self.layers)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features [M, F]."""
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
