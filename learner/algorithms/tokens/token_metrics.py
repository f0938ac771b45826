"""What an update of a token policy tells: metrics of sampled tokens, of whole responses, of the critic."""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from penstock.learner.algorithms.shared.loss import (
    clip_fraction,
    divergence,
    effective_sample_size,
    explained_variance,
    largest_ratio,
)
from penstock.learner.algorithms.tokens.responses import Responses
from penstock.learner.algorithms.tokens.token_network import CRITIC, POLICY
from penstock.learner.algorithms.tokens.token_preparation import Prepared

METRICS: Final = (
    "policy_loss",
    "entropy",
    "gradient_norm",
    "kl_behaviour",
    "kl_proximal",
    "effective_sample_size",
    "max_ratio",
    "clip_fraction",
    "engine_difference",
    "kl_reference",
    "kl_coefficient",
    "score",
    "response_length",
    "finished_fraction",
    "left_out",
    "learning_rate",
    "entropy_coefficient",
    "epochs",
)
"""The metrics of PPO, over sampled tokens.

`kl_reference`: KL(π_prox‖π_ref) in nats per response; it is what β (`kl_coefficient`) is adapted to; absent
where that is 0, when nothing reads the reference. `engine_difference`: mean |log π − log μ| of tokens that
the learner's own weights sampled, in nats: how far what generates computes otherwise than what learns;
absent where no token is of these weights. `score`: mean reward of a response before penalties.
`finished_fraction`: share of the responses that ended by themselves. `left_out`: columns that are no whole
response.
"""
CRITIC_METRICS: Final = (
    "value_loss",
    "explained_variance",
    "mean_value",
    "critic_gradient_norm",
    "critic_learning_rate",
)
"""Beside these where there is a critic."""


@dataclass(slots=True)
class TokenGradientRecord:
    """What the gradient steps leave behind, on the device.

    log_prob: [n], of π_θ before each step of the last epoch.
    """

    log_prob: Tensor
    losses: list[Tensor] = field(default_factory=list)
    norms: dict[str, list[Tensor]] = field(default_factory=lambda: {POLICY: [], CRITIC: []})
    epochs: int = 0


def watched(prepared: Prepared, record: TokenGradientRecord, clip_range: float) -> dict[str, Tensor]:
    """Of tokens: how far the policy has moved, from what, and by which loss."""
    log_prob, behaviour, norms = record.log_prob, prepared.behaviour, record.norms[POLICY]
    still = torch.zeros_like(prepared.entropy)
    found = {
        "policy_loss": torch.stack(record.losses).mean(0)[0],
        "entropy": prepared.entropy,
        "gradient_norm": torch.stack(norms).mean() if norms else still,
        "kl_behaviour": divergence(behaviour, log_prob),
        "kl_proximal": divergence(prepared.proximal, log_prob),
        "effective_sample_size": effective_sample_size(behaviour, log_prob),
        "max_ratio": largest_ratio(behaviour, log_prob),
        "clip_fraction": clip_fraction(log_prob, prepared.anchor, clip_range),
    }
    return found if prepared.kl_reference is None else found | {"kl_reference": prepared.kl_reference}


def engine_difference(prepared: Prepared, is_own: Tensor) -> Tensor:
    """Return how far the generator's log-probabilities are from the learner's; is_own: bool [n], else nan."""
    difference: Tensor = (prepared.proximal - prepared.behaviour).abs()
    return difference.mul(is_own).sum() / is_own.sum()


def of_responses(responses: Responses) -> dict[str, Tensor]:
    """Return what was said of them."""
    return {
        "score": responses.reward.sum() / len(responses),
        "finished_fraction": 1.0 - responses.cut_short.float().mean(),
    }


def of_critic(prepared: Prepared, record: TokenGradientRecord) -> dict[str, Tensor]:
    """Return how well it foretells the returns."""
    return {
        "value_loss": torch.stack(record.losses).mean(0)[1],
        "explained_variance": explained_variance(prepared.old_value, prepared.target),
        "mean_value": prepared.old_value.mean(),
        "critic_gradient_norm": torch.stack(record.norms[CRITIC]).mean(),
    }
