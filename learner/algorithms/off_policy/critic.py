"""Critics of continuous actions: two, of which the smaller value counts (Fujimoto et al. 2018, section 4.2).

M rows, A elements of an action, squashed to (−1, 1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.policy.networks import ACTIVATIONS, Inputs, Reader, initialise
from penstock.policy.trunks import ImageEncoder

_HIDDEN_GAIN = 2.0**0.5


class Critic(nn.Module):
    """Computes Q(s, a): one encoder per image, then hidden layers over features, vector part and action."""

    def __init__(self, reader: Reader, actions: int, hidden_sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        encoders = [ImageEncoder(path, leaf, "auto") for path, leaf in reader.images]
        self.images = nn.ModuleList(encoders)
        width = reader.width + sum(encoder.width for encoder in encoders) + actions
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), ACTIVATIONS[activation]()]
            width = size
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Return Q [M] of actions [M, A]."""
        seen = [encoder(image) for encoder, image in zip(self.images, inputs.images, strict=True)]
        value: Tensor = self.head(self.layers(torch.cat([inputs.vector, *seen, action], 1)))
        return value.squeeze(1)


class TwinCritics(nn.Module):
    """Two critics with weights of their own; equal arguments give equal weights."""

    def __init__(
        self, reader: Reader, actions: int, hidden_sizes: Sequence[int], activation: str, *, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.both = nn.ModuleList(Critic(reader, actions, hidden_sizes, activation) for _ in range(2))
        for critic in self.both:
            initialise(critic, _HIDDEN_GAIN, generator)
            assert isinstance(critic, Critic)
            initialise(critic.head, 1.0, generator)

    def forward(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Return both values [2, M] of actions [M, A]."""
        return torch.stack([critic(inputs, action) for critic in self.both])
