"""Convolutional trunks: a uint8 image in, features out; `policy.image_trunk` chooses one.

nature   three convolutions and 512 features (Mnih et al. 2015); from 36 pixels on
small    two convolutions of 3x3 with stride 2 and 512 features; any image
impala   three sections of a convolution, a pooling and two residual blocks, and 256 features: the large
         network of Espeholt et al. (2018, figure 3) without its LSTM; from 8 pixels on
auto     nature where the image is large enough, else small
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.protocol.spaces import Leaf

FEATURES: Final = {"nature": 512, "small": 512, "impala": 256}
SMALLEST: Final = {"nature": 36, "small": 1, "impala": 8}
"""Least pixels of the shorter side; of less, impala's three poolings would leave a single one."""
_IMPALA_CHANNELS: Final = (16, 32, 32)


class ImageEncoder(nn.Module):
    """The trunk of one image, with its last linear layer.

    width: number of features that it returns. Raises ValueError that names `path` for an image too small for
    `trunk`.
    """

    def __init__(self, path: str, leaf: Leaf, trunk: str) -> None:
        super().__init__()
        shape = leaf.shape
        self.rank = len(shape)
        self.channels_first = self.rank == 3 and shape[0] < shape[-1]
        channels, *size = _planes(shape, channels_first=self.channels_first)
        name = _chosen(path, leaf, trunk, min(size))
        convolutions = nn.Sequential(*_CONVOLUTIONS[name](channels), nn.Flatten())
        with torch.no_grad():
            flat = convolutions(torch.zeros(1, channels, *size)).shape[1]
        self.width = FEATURES[name]
        self.layers = nn.Sequential(*convolutions, nn.Linear(flat, self.width), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        """Return features [M, width] of images, uint8 [M, *shape]."""
        rows = image.unsqueeze(-1) if self.rank == 2 else image
        planes = rows if self.channels_first else rows.permute(0, 3, 1, 2)
        features: Tensor = self.layers(planes.to(next(self.parameters()).dtype) / 255)
        return features


def _planes(shape: tuple[int, ...], *, channels_first: bool) -> tuple[int, int, int]:
    """Return channels, height, width."""
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
    """x + conv(relu(conv(relu(x)))). Begins as the identity: six blocks would multiply the variance."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, 1, 1)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, planes: Tensor) -> Tensor:
        """Return planes of the same shape, [M, C, H, W]."""
        inner: Tensor = self.second(functional.relu(self.first(functional.relu(planes))))
        return planes + inner
