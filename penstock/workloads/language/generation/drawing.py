"""Tokens drawn from log-probabilities by one number each."""

import torch
from torch import Tensor


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for each row, int64 [N].

    log_probs: [N, V], of which a row need not add up to 1. uniform: float64 [N], in [0, 1).
    """
    sums = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    # Below the total, which rounding could reach: a token without a share is never drawn.
    point = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, point[:, None], right=True)[:, 0]


def only_likely(log_probs: Tensor, share: float) -> Tensor:
    """Without the least likely tokens that are not needed for this share, [V] → [V] (nucleus sampling)."""
    ordered, order = log_probs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    before[0] = -1.0  # the likeliest stays, however the sum is rounded
    return log_probs.index_fill(0, order[before >= share], -torch.inf)
