"""Policies over token sequences, as algorithms use them, independent of the language model.

A row is one sequence: a prompt and its response, padded on the right. Outputs are for the wanted places only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TokenRows:
    """B rows of L tokens, and n places in them, on the device of the policy.

    tokens: int64 [B, L].
    present: bool [B, L], True for tokens, False for padding.
    place: int64 [n], of the B·L places row by row, at which `action` [n], int64, was the next token.
    """

    tokens: Tensor
    present: Tensor
    place: Tensor
    action: Tensor


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Of n places, float32 [n]. log_prob: of the action. entropy: of the next token, in nats. value: V."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class TokenPolicy(Protocol):
    """A policy and its critic, which is not published."""

    def trained(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that are published and trained, by name, in float32."""
        ...

    @property
    def critic(self) -> nn.Module:
        """Return the value module, whose parameters are trained by the value loss alone."""
        ...

    @property
    def published(self) -> nn.Module:
        """Return the module whose `state_dict` is `trained`."""
        ...

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        """Return the policy's outputs, differentiable."""
        ...

    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        """Return log-probabilities [n] of the actions under the policy that training began with."""
        ...
