"""The values of a language policy are made by these; they stay with the learner.

ValueHead      of the features that the policy's last layer reads
AdapterCritic  of features that an adapter of its own makes of the same frozen weights
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.policy.tokens import TokenRows
from penstock.workloads.language.policy import adapter_network as networks


class ValueHead(nn.Module):
    """Features [n, H] → values [n]; 0 until it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the values V of the states."""
        values: Tensor = self.last(torch.tanh(self.hidden(features)))
        return values.squeeze(-1)


class AdapterCritic(nn.Module):
    """A network beside the policy's, over the same frozen weights, and a head.

    Its parameters and its `state_dict` are the adapter and the head alone: the frozen weights are not its
    own. Neither adapter is ever active in the other's network, so that no pass has to switch them, a pass
    that checkpoints activations and computes them again in the backward pass neither.
    """

    def __init__(self, policy: networks.Network, *, checkpoints: bool) -> None:
        """policy: network with an adapter. checkpoints: whether activations are computed twice."""
        super().__init__()
        self.network = networks.beside(policy)
        self.head = ValueHead(networks.width(policy))
        self._checkpoints = checkpoints

    def forward(self, rows: TokenRows) -> Tensor:
        """Return the values V of n places, float32 [n]; one more pass over the frozen weights."""
        if self._checkpoints:
            networks.keep_fewer_activations(self.network)
        features = networks.features(self.network, rows.tokens, rows.present, rows.place)
        values: Tensor = self.head(features.float()).float()
        return values

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what is trained: the adapter and the head."""
        for part, own in (
            ("adapter", networks.trained(self.network)),
            ("head", dict(self.head.named_parameters())),
        ):
            yield from ((f"{part}.{name}", parameter) for name, parameter in own.items())

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained, sharing its memory."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}
