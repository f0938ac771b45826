"""The one read of the device at the end of an update: its metrics, and whether it may be kept.

Everything is computed as tensors and read at once, so that no gradient step waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from penstock.learner.algorithms.on_policy.gradient_steps import GradientRecord
from penstock.learner.algorithms.on_policy.preparation import Prepared
from penstock.learner.algorithms.shared.containment import verdict
from penstock.learner.algorithms.shared.loss import (
    divergence,
    effective_sample_size,
    explained_variance,
    largest_ratio,
)
from penstock.learner.algorithms.shared.rank_group import RankGroup
from penstock.learner.algorithms.shared.steps import AllRankSteps
from penstock.policy.layers import Measured
from penstock.policy.numbers import Numbers

METRICS: Final = (
    "policy_loss",
    "value_loss",
    "entropy",
    "gradient_norm",
    "kl_behaviour",
    "effective_sample_size",
    "max_ratio",
    "explained_variance",
    "mean_value",
    "learning_rate",
    "entropy_coefficient",
)
"""`kl_behaviour` is KL(μ‖π_θ) in nats; it, `effective_sample_size` and `max_ratio` (π_θ/μ) are of the last
epoch, `entropy` (nats) and `explained_variance` of the batch's start, losses and `gradient_norm` means
over gradient steps. All of them are of the rows of all ranks."""

_JUDGED: Final = ("policy_loss", "value_loss", "entropy", "gradient_norm")
"""Metrics that must be finite for an update to be kept, beside parameters, moments and statistics."""

_SUMMED: Final = ("policy_loss", "value_loss", "entropy", "optimiser")
"""Of which every rank holds a share. The last is no metric: not finite on one rank, it is so on all."""


def last_epoch(record: GradientRecord) -> tuple[AllRankSteps, Tensor]:
    """Return the steps of the last epoch and log π_θ of each, [n], of all ranks."""
    assert record.rows is not None, "an update has at least one epoch"
    assert record.split is not None, "an update has at least one epoch"
    log_prob = record.split.gather(torch.cat(record.log_prob))
    return AllRankSteps(record.split.gather(record.rows.columns)), log_prob


def measure_update(
    prepared: Prepared,
    record: GradientRecord,
    group: RankGroup,
    steps: tuple[AllRankSteps, Tensor],
    *,
    more: Mapping[str, Tensor],
    optimiser: Tensor,
    activations: Measured | None,
    max_log_ratio: float,
) -> tuple[str, dict[str, float]]:
    """Return why the update is not to be kept, on any rank, or "", and the metrics that are finite.

    Args:
        prepared: what was computed before the gradient steps.
        record: what the gradient steps left behind.
        group: the ranks, over which losses are added up.
        steps: those of the last epoch, of `last_epoch`.
        more: scalars on the device that the algorithm measures besides.
        optimiser: a scalar that is finite where parameters and moments are.
        activations: statistics of layers under the new weights, where there are some.
        max_log_ratio: the largest |log π/μ| that is plausible.
    """
    rows, log_prob = steps
    summed = dict(zip(_SUMMED, group.sum_(_own_shares(prepared, record, optimiser)), strict=True))
    checks = {"optimiser": summed.pop("optimiser")}
    tensors = {
        **summed,
        "gradient_norm": torch.stack(record.norms).mean(),
        "kl_behaviour": divergence(rows.behaviour, log_prob),
        "effective_sample_size": effective_sample_size(rows.behaviour, log_prob),
        "max_ratio": largest_ratio(rows.behaviour, log_prob),
        "explained_variance": explained_variance(rows.old_value, rows.target),
        "mean_value": rows.old_value.mean(),
        **more,
    }
    if prepared.observed is not None:
        checks["observed"] = prepared.observed.checksum().to(log_prob.dtype)
    if activations is not None:
        checks["activations"] = activations.checksum().to(log_prob.dtype)
    numbers = torch.stack([*tensors.values(), *checks.values(), _largest_log_ratio(prepared)]).tolist()
    metrics = dict(zip(tensors, numbers, strict=False))
    judged = [*(metrics[name] for name in _JUDGED), *numbers[len(tensors) :]]
    finite = {name: number for name, number in metrics.items() if math.isfinite(number)}
    return verdict(judged, max_log_ratio), finite


def _largest_log_ratio(prepared: Prepared) -> Tensor:
    """Return the largest |log π/μ| of all ranks' rows, a scalar."""
    own = (prepared.rows.proximal - prepared.rows.behaviour).abs()
    return prepared.rank_rows.gather(own).max()


def _own_shares(prepared: Prepared, record: GradientRecord, optimiser: Tensor) -> Tensor:
    """Return this rank's share of `_SUMMED`, [4]."""
    losses = [_mean(record.policy_losses), _mean(record.value_losses)]
    return torch.stack([*(loss.to(optimiser) for loss in losses), prepared.entropy, optimiser])


def _mean(scalars: Sequence[Numbers]) -> Tensor:
    """Return the mean of scalars that are all tensors or all numpy's."""
    of_tensors = isinstance(scalars[0], Tensor)
    return (torch.stack(list(scalars)) if of_tensors else torch.tensor(scalars)).mean()
