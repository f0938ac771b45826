"""Policies over token sequences, as an algorithm sees them; which model stands behind is not known here.

A row is one sequence: a prompt and its response, padded on the right. A policy reads whole rows and answers
for the wanted places in them only, flat, so that nothing of the size of a vocabulary is made for prompts and
padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TokenRows:
    """B rows of L tokens, and n places in them. Everything on the device of the policy.

    tokens: int64 [B, L].   present: bool [B, L], True for tokens, False for the padding behind them.
    place: int64 [n], of the B·L places row by row, at which `action` [n], int64, was the next token.
    """

    tokens: Tensor
    present: Tensor
    place: Tensor
    action: Tensor


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Of n places, float32 [n] each. log_prob: of the action.

    entropy: of the next token, in nats. value: V.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class TokenPolicy(Protocol):
    """What is trained. The values are in no version that is published."""

    def trained(self) -> Mapping[str, nn.Parameter]:
        """What is published and trained, by name, in float32: an adapter, or all weights."""
        ...

    @property
    def critic(self) -> nn.Module:
        """What makes a value of the policy's features."""
        ...

    @property
    def published(self) -> nn.Module:
        """Its `state_dict` is `trained`."""
        ...

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        """Of the policy, differentiable."""
        ...

    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        """Log-probabilities of the actions under the policy that training began with, [n], without gradient."""
        ...
