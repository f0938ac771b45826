"""The loss of a network of several heads, where most people rate some things only.

    thumb    −t log s − (1 − t) log(1 − s)           s = σ(z), the head's share
    rating   RATING_WEIGHT · (s − t)²
    pair     −log σ(z_chosen − z_rejected) + centring · (z_chosen + z_rejected)²       of the last head

A head's loss is the mean over the ratings that it has in the batch; what is missing is in neither sum nor
count. The loss of the batch is the sum over its heads.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

RATING_WEIGHT: Final = 4.0
"""The slope of (σ(z) − t)² is at most a quarter of the cross-entropy's: this makes them comparable."""


def heads_loss(logits: Tensor, targets: Tensor, is_choice: Tensor, pairs: Tensor, centring: float) -> Tensor:
    """Return the loss of a batch.

    logits: [S, K] of S rated responses. targets: 0 to 1, NaN where unrated, [S, K]. is_choice: bool [K].
    pairs: logits of the comparing head, (chosen, rejected), [P, 2].
    """
    total = logits.sum() * 0.0  # of a batch without any rating too
    if len(logits):
        given = ~targets.isnan()
        known = torch.where(given, targets, torch.zeros_like(targets))
        choice = functional.binary_cross_entropy_with_logits(logits, known, reduction="none")
        rating = RATING_WEIGHT * (logits.sigmoid() - known) ** 2
        each = torch.where(is_choice, choice, rating) * given
        total = total + (each.sum(0) / given.sum(0).clamp(min=1)).sum()
    if len(pairs):
        chosen, rejected = pairs.unbind(1)
        apart = functional.softplus(rejected - chosen) + centring * (chosen + rejected) ** 2
        total = total + apart.mean()
    return total
