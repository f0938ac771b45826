"""Hidden layers that act alike in actor and learner: every forward pass is one in evaluation mode.

A log-probability of the actor, of π_prox and of the gradient step comes from the same function of the
weights, so that a ratio on fresh experience is 1. The steps that other libraries take in "training mode"
happen here between those passes, at two places that an algorithm names:

  BatchNorm   normalises with statistics that are constant while an update runs; `measure` after its last
              gradient step measures the rows, `Measured.merge` adds them to the statistics, as the
              normaliser of observations does
  Dropout     is the identity but inside `thinned`: the learner differentiates a thinned network there,
              with the ratio from the whole one
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.policy.normaliser import Moments, moments

_EPSILON = 1e-5
_NEWEST_SHARE = 0.01
"""Least weight of the newest batch in the statistics.

Activations drift as the weights below them change, but no ratio bounds the change that new statistics make
to the policy: with 0.1 none of five seeds solved CartPole, with 0.03 two did.
"""


class BatchNorm(nn.Module):
    """Normalises features (Ioffe and Szegedy 2015) with frozen statistics, then scales and shifts them.

    Parameters: weight, bias [F]. Buffers, part of the weights: merges [], mean [F], variance [F], all
    float64.
    """

    merges: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("merges", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))
        self.measuring: Callable[[Moments], Moments] | None = None
        self.seen: Moments | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Return [M, F] for [M, F]; a row does not depend on its neighbours."""
        mean, variance = self.mean, self.variance
        if self.measuring is not None:
            self.seen = self.measuring(moments(rows))
            # The layers behind this one are measured as they will be fed.
            mean, variance = self._merged(self.seen)
        scale = (variance + _EPSILON).rsqrt().to(rows.dtype) * self.weight
        return (rows - mean.to(rows.dtype)) * scale + self.bias

    def merge(self, new: Moments) -> None:
        """Move the statistics towards those of a batch.

        They are the mean of the first hundred batches, then a moving average.
        """
        mean, variance = self._merged(new)
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.merges += 1

    def _merged(self, new: Moments) -> tuple[Tensor, Tensor]:
        weight = (1.0 / (self.merges + 1.0)).clamp(min=_NEWEST_SHARE)
        variance = new.spread / new.count
        # Rows that are all alike tell no scale: divided by it, the next small change of the weights below
        # would be 300 times as large, in every layer.
        merged = self.variance.lerp(variance, weight).where(variance > _EPSILON, self.variance)
        return self.mean.lerp(new.mean, weight), merged


@dataclass(frozen=True, slots=True)
class Measured:
    """Moments of the rows that passed each layer of batch normalisation, not yet merged."""

    seen: tuple[tuple[BatchNorm, Moments], ...]

    def checksum(self) -> Tensor:
        """Return a scalar on the device that is finite exactly when all moments are."""
        return torch.stack([moments.checksum() for _, moments in self.seen]).sum()

    def merge(self) -> None:
        """Merge the moments into the layers' statistics."""
        for layer, seen in self.seen:
            layer.merge(seen)


def measure(
    module: nn.Module, forward: Callable[[], object], whole: Callable[[Moments], Moments] = lambda own: own
) -> Measured | None:
    """Run `forward` without gradients and return what its layers of batch normalisation saw.

    None without any.

    Args:
        module: the network whose layers are measured.
        forward: runs the network on the rows to measure.
        whole: converts the moments of a layer's rows in this process to those of its rows in all ranks.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    if not layers:
        return None
    for layer in layers:
        layer.measuring = whole
    try:
        with torch.no_grad():
            forward()
        seen = tuple((layer, layer.seen) for layer in layers if layer.seen is not None)
        return Measured(seen) if seen else None
    finally:
        for layer in layers:
            layer.measuring, layer.seen = None, None


class Dropout(nn.Module):
    """Zeroes features with probability `rate` and scales the others up, inside `thinned` only.

    See Srivastava et al. 2014.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.random: torch.Generator | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        if self.random is None:
            return rows
        kept = torch.empty_like(rows).bernoulli_(1.0 - self.rate, generator=self.random)
        return rows * kept.div_(1.0 - self.rate)


def dropouts(module: nn.Module) -> tuple[Dropout, ...]:
    """Return the layers of a module that `thinned` switches on."""
    return tuple(layer for layer in module.modules() if isinstance(layer, Dropout))


@contextmanager
def thinned(layers: Sequence[Dropout], seed: int, device: torch.device) -> Iterator[None]:
    """Drop features in the forward passes inside the block; equal seeds drop the same ones.

    layers: those of `dropouts`. device: of the features.
    """
    random = torch.Generator(device).manual_seed(seed)
    for layer in layers:
        layer.random = random
    try:
        yield
    finally:
        for layer in layers:
            layer.random = None
