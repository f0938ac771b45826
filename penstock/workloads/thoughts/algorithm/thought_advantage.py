"""Rewards and advantages of thoughts; pure functions.

R thoughts with n sampled tokens; `row` int64 [n] says whose a token is, `group` int64 [R], rising, on which
question a thought is. A thought is an episode that ends with its last token, where its reward is.
"""

import torch
from torch import Tensor


def rewards(with_thought: Tensor, without: Tensor, *, bound: float) -> Tensor:
    """Log p(y|x,z) − log p(y|x) within ± bound, [R]."""
    return (with_thought - without).clamp(-bound, bound)


def of_another_question(reward: Tensor, group: Tensor) -> Tensor:
    """Return for each thought the reward of one on the next question, [R]; the last one gets the first's."""
    return reward.roll(-int((group == 0).sum()))


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """Return for each thought the mean over those on its question, [R]."""
    count = int(group[-1]) + 1
    sums = values.new_zeros(count).index_add(0, group, values)
    return (sums / torch.bincount(group, minlength=count))[group]


def group_scale(group: Tensor) -> Tensor:
    """Return G / (G − 1) for each thought, 1 for one that is alone, [R].

    A mean that holds the thought itself takes a G-th of its own reward away with it.
    """
    sizes = torch.bincount(group)[group].double()
    return torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), torch.ones_like(sizes)).float()


def return_advantages(
    reward: Tensor, row: Tensor, group: Tensor, *, value: Tensor | None, is_grouped: bool
) -> Tensor:
    """Return R − b of each token, [n].

    value: [n], b of a learned baseline; None: there is none. is_grouped: the mean of what is left over the
    thoughts of a question is taken away too, and the difference scaled by G / (G − 1).
    """
    left = reward[row] if value is None else reward[row] - value
    if not is_grouped:
        return left
    means = left.new_zeros(len(reward)).index_add(0, row, left) / torch.bincount(row, minlength=len(reward))
    return (left - group_mean(means, group)[row]) * group_scale(group)[row]


def gae_advantages(
    reward: Tensor, value: Tensor, row: Tensor, last: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """Return GAE(λ) over the tokens of each thought (Schulman et al. 2016), [n].

    δ_t = r_t + γ V_{t+1} − V_t with r = R and V = 0 behind the last token;  A_t = Σ (γλ)^k δ_{t+k}.

    last: int64 [R], the last token of each thought.
    """
    advantage, carried = torch.zeros_like(value), 0.0
    ends = set(last.tolist())
    numbers, values, rows = reward.tolist(), value.tolist(), row.tolist()
    for token in range(len(values) - 1, -1, -1):
        is_last = token in ends
        delta = (numbers[rows[token]] if is_last else discount * values[token + 1]) - values[token]
        carried = delta + (0.0 if is_last else discount * gae_lambda * carried)
        advantage[token] = carried
    return advantage
