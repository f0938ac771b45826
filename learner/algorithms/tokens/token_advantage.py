"""Rewards and advantages of sampled tokens; pure functions.

Axes: S tokens, R responses, those of a response behind one another as if nothing lay between them; `sampled`
[S, R] is False behind its last. A response is an episode that ends with its last token: nothing follows, also
where its length ended it, because the score speaks of all of it. A conversation has several turns in its row,
and one that was cut goes on: `beyond` is the value of what follows it.
"""

import torch
from torch import Tensor

from penstock.learner.algorithms.shared.advantage import Advantages, carries, gae

DEVIATION_FLOOR = 1e-4
"""Differences below it are noise that division by a deviation must not blow up, in the unit of the score."""


def scored(reward: Tensor, cut: Tensor, *, eos_penalty: float) -> Tensor:
    """r_t − penalty · 1[t is where the length ended a response]; all [n]."""
    return reward - eos_penalty * cut.to(reward.dtype)


def divergence_reward(log_ratio: Tensor, *, coefficient: float, bound: float) -> Tensor:
    """−β clip(log π/π_ref, ±bound), [n].

    The estimator of KL(π‖π_ref) is a reward, without gradient (Ziegler et al. 2019, eq. 2): its policy
    gradient is that of the divergence itself.
    """
    return -coefficient * log_ratio.clamp(-bound, bound)


def turn_discounts(turn_end: Tensor, *, discount: float, turn_discount: float) -> Tensor:
    """γ of each token, and γ γ_turn of the last one of a turn that another follows; bool → float [S, R]."""
    within = torch.full(turn_end.shape, discount, device=turn_end.device)
    return within.masked_fill(turn_end, discount * turn_discount)


def token_gae(
    reward: Tensor,
    value: Tensor,
    sampled: Tensor,
    *,
    discount: float | Tensor,
    gae_lambda: float,
    value_lambda: float,
    beyond: Tensor | None = None,
) -> Advantages:
    """GAE(λ) for the policy and GAE(λ_V) for the critic (Yuan et al. 2025); [S, R] each.

    δ_t = r_t + γ V_{t+1} − V_t, V = `beyond` behind the last token;
    A_t = Σ (γλ)^k δ_{t+k};  target = V_t + Σ (γλ_V)^k δ_{t+k}.

    discount: γ, of all tokens or of each, [S, R], as `turn_discounts` says.
    beyond: [R], 0 where a row ended; None: all of them did.
    """
    following = torch.zeros_like(value)
    following[:-1] = value[1:]
    carried = _carried(sampled)
    following = following.masked_fill(~carried, 0.0)
    if beyond is not None:
        following = torch.where(sampled & ~carried, beyond, following)
    unroll = (reward, value, following, carried, sampled)
    for_policy = gae(*unroll, discount=discount, gae_lambda=gae_lambda)
    if value_lambda == gae_lambda:
        return for_policy
    return Advantages(for_policy.advantage, gae(*unroll, discount=discount, gae_lambda=value_lambda).target)


def returns(reward: Tensor, sampled: Tensor, *, discount: float) -> Tensor:
    """Σ γ^k r_{t+k} to the end of the response, [S, R]."""
    nothing = torch.zeros_like(reward)
    return gae(
        reward, nothing, nothing, _carried(sampled), sampled, discount=discount, gae_lambda=1.0
    ).advantage


def leave_one_out(reward: Tensor, sampled: Tensor, *, discount: float) -> Tensor:
    """Return the advantages of REINFORCE with a leave-one-out baseline (Kool et al. 2019), [S, R].

    The baseline is the mean return of the other responses of the batch.
    Nothing is subtracted from a response that is alone.
    """
    ahead = returns(reward, sampled, discount=discount)
    return (ahead - _of_others(ahead[0])).masked_fill(~sampled, 0.0)


def group_relative(
    score: Tensor,
    divergence: Tensor,
    sampled: Tensor,
    group: Tensor,
    *,
    discount: float,
    by_deviation: bool,
) -> Tensor:
    """Return (G − mean)/deviation of the scores G of a group, and each token's divergence beside it, [S, R].

    Shao et al. 2024: the score alone is normalised (section 4.1.2), and all tokens of a response share it.
    The divergence is a term of each token (eq. 4): nothing divides it, so that a group of equal scores moves
    the policy by β alone. Its mean over the batch is taken away, which changes no expected gradient.

    score, divergence: [S, R], of `scored` and of `divergence_reward`.
    group: int64 [R], numbers of the prompts.   by_deviation: False: G − mean (Liu et al. 2025).
    A response without another to its prompt is held against the rest of the batch instead: its own mean would
    leave nothing of it.
    """
    total = returns(score, sampled, discount=discount)[0]
    sums = total.new_zeros(len(group)).index_add(0, group, total)
    sizes = total.new_zeros(len(group)).index_add(0, group, torch.ones_like(total))
    alone = (sizes == 1)[group]
    difference = total - torch.where(alone, _of_others(total), (sums / sizes)[group])
    if by_deviation:
        squares = total.new_zeros(len(group)).index_add(0, group, difference.square())
        of_group = (squares / sizes).sqrt()[group]
        # A batch of one has no deviation to divide by.
        of_batch = total.std(correction=0) if len(total) > 1 else torch.ones_like(total)
        difference = difference / torch.where(alone, of_batch, of_group).clamp(min=DEVIATION_FLOOR)
    charged = divergence - divergence[sampled].mean()
    return (difference + charged).masked_fill(~sampled, 0.0)


def whitened(advantage: Tensor, responses: int) -> Tensor:
    """Mean 0 and deviation 1 over the tokens [n] of two responses or more; one alone keeps what it has."""
    if responses < 2:
        return advantage
    centred = advantage - advantage.mean()
    return centred / centred.std(correction=0).clamp(min=DEVIATION_FLOOR)


def _carried(sampled: Tensor) -> Tensor:
    nowhere = torch.zeros_like(sampled)
    return carries(nowhere, nowhere, sampled)


def _of_others(total: Tensor) -> Tensor:
    """Mean of all the others, [R]; 0 where there are none."""
    if len(total) == 1:
        return torch.zeros_like(total)
    return (total.sum() - total) / (len(total) - 1)
