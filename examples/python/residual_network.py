"""A network of one's own: residual blocks over the vector part of an observation, the images through a trunk.

penstock train CartPole-v1 --set policy.network=residual_network:ResidualNetwork --set
policy.network_arguments.blocks=3

from this folder, or with it on PYTHONPATH. The contract is `penstock.policy.actor_critic.Network`.
"""

import torch
from torch import Tensor, nn

from penstock.policy.networks import Dropout, ImageEncoder, Inputs, Reader


class ResidualNetwork(nn.Module):
    """x + linear(relu(linear(norm(x)))), several times; features of images are joined at the beginning."""

    def __init__(self, reader: Reader, width: int = 64, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        encoders = [ImageEncoder(path, leaf, "auto") for path, leaf in reader.images]
        self.images = nn.ModuleList(encoders)
        self.first = nn.Linear(reader.width + sum(encoder.width for encoder in encoders), width)
        self.blocks = nn.ModuleList(self._block(dropout) for _ in range(blocks))

    def _block(self, dropout: float) -> nn.Module:
        inner, last = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)
        nn.init.zeros_(last.weight)
        return nn.Sequential(nn.LayerNorm(self.width), inner, nn.ReLU(), Dropout(dropout), last)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features [M, width] of inputs [M, width]."""
        seen = [encoder(image) for encoder, image in zip(self.images, inputs.images, strict=True)]
        features: Tensor = self.first(torch.cat([inputs.vector, *seen], 1))
        for block in self.blocks:
            features = features + block(features)
        return features
