"""Running mean and variance of observations: part of the weights, frozen while an update runs.

Kept in float64 and combined exactly (Chan, Golub, LeVeque 1979), so that any grouping of the same
steps gives the same statistics, as long as no observation lies too far out to count whole. Before the first
merge they are mean 0 and variance 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.policy.acting.array_policy import VARIANCE_FLOOR

_FARTHEST = 100.0
"""Standard deviations from the mean, as far as an observation counts once there are statistics: without this
one fragment could widen them for as long as the run goes on, and nothing else would be told apart."""


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
    """Computes (x − mean)/√var, clipped. Buffers: count [], mean [D], variance [D], all float64."""

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
        """Return the moments of raw rows [n, D]; what lies beyond `_FARTHEST` counts as if it lay there."""
        wide = rows.double()
        reach = _FARTHEST * (self.variance + VARIANCE_FLOOR).sqrt()
        near = wide.clamp(self.mean - reach, self.mean + reach)
        return moments(torch.where(wide.isfinite() & (self.count > 0), near, wide))

    def merge(self, new: Moments) -> None:
        """Add the rows that `new` was computed from to the statistics."""
        old = Moments(self.count, self.mean, self.variance * self.count)
        both = combine(old, new)
        self.count.copy_(both.count)
        self.mean.copy_(both.mean)
        self.variance.copy_(both.spread / both.count.clamp(min=1.0))
