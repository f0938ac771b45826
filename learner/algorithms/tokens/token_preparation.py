"""What is computed once per batch of responses, before its epochs.

That is rewards with their penalties, advantages and targets.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.sections.token import TokenPPOSection
from penstock.learner.algorithms.shared.advantage import Advantages
from penstock.learner.algorithms.shared.loss import decoupled
from penstock.learner.algorithms.shared.steps import Steps
from penstock.learner.algorithms.tokens.responses import Grid, Responses
from penstock.learner.algorithms.tokens.token_advantage import (
    divergence_reward,
    group_relative,
    leave_one_out,
    scored,
    token_gae,
    turn_discounts,
    whitened,
)


@dataclass(frozen=True, slots=True)
class Prepared(Steps):
    """What is prepared of the n sampled tokens.

    columns: [6, n], see `Steps`. entropy: scalar. kl_reference: scalar, nats per response; None: nothing
    holds the policy to a reference.
    """

    columns: Tensor
    entropy: Tensor
    kl_reference: Tensor | None


class Rewards(NamedTuple):
    """Of each token, [S, R]: what it was given, and what its divergence from the reference costs."""

    score: Tensor
    divergence: Tensor


def prepare(
    responses: Responses,
    read: Tensor,
    section: TokenPPOSection,
    kl_coefficient: float,
    beyond: Tensor | None = None,
) -> Prepared:
    """Return what the epochs of an update take.

    read: log π_prox, entropy, V, [3, n], and log π_ref, [4, n], where a coefficient multiplies it.
    beyond: [R], the value of what follows each row; None: nothing follows any.
    """
    (proximal, entropy, value), reference = read[:3], read[3:]
    log_ratio = proximal - (reference[0] if len(reference) else proximal)
    grid = Grid(responses)
    ends = responses.cut_short.to(read.dtype)
    cut = torch.zeros_like(proximal).index_copy(0, responses.last, ends)
    rewards = Rewards(
        grid.spread(scored(responses.reward, cut, eos_penalty=section.eos_penalty)),
        grid.spread(divergence_reward(log_ratio, coefficient=kl_coefficient, bound=section.log_ratio_bound)),
    )
    estimated = _advantages(responses, grid, section, rewards, grid.spread(value), beyond)
    advantage, target = grid.gather(estimated.advantage), grid.gather(estimated.target)
    if section.normalise_advantages and section.advantage != "group":
        advantage = whitened(advantage, len(responses))
    surrogate = decoupled(responses.behaviour, proximal, advantage, section.behaviour_weight_cap)
    fixed = (surrogate.anchor, surrogate.weighted_advantage, target, value, responses.behaviour, proximal)
    kl_reference = log_ratio.sum() / len(responses) if len(reference) else None
    return Prepared(torch.stack(fixed), entropy.mean(), kl_reference)


def _advantages(
    responses: Responses,
    grid: Grid,
    section: TokenPPOSection,
    rewards: Rewards,
    value: Tensor,
    beyond: Tensor | None,
) -> Advantages:
    """[S, R] each; without a critic the targets are its values."""
    discount, reward = section.discount, rewards.score + rewards.divergence
    match section.advantage:
        case "gae":
            return token_gae(
                reward,
                value,
                grid.sampled,
                discount=_discounts(responses, grid, section),
                gae_lambda=section.gae_lambda,
                value_lambda=section.value_lambda,
                beyond=beyond,
            )
        case "group":
            prompts, by_deviation = responses.prompts(), section.normalise_advantages
            advantage = group_relative(
                *rewards, grid.sampled, prompts, discount=discount, by_deviation=by_deviation
            )
        case "reinforce":
            advantage = leave_one_out(reward, grid.sampled, discount=discount)
    return Advantages(advantage, value)


def _discounts(responses: Responses, grid: Grid, section: TokenPPOSection) -> float | Tensor:
    if section.turn_discount == 1.0:
        return section.discount
    return turn_discounts(
        grid.spread(responses.turn_ends), discount=section.discount, turn_discount=section.turn_discount
    )
