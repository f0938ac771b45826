"""Advantages of thoughts, and the baselines that they are measured from."""

from itertools import pairwise

import torch
from torch import Tensor, nn


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
    """Return G / (G − 1) for each thought, 1 for one alone, [R]: a mean holds a G-th of its own reward."""
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


# ---- A network that guesses the reward of a thought from the states of the model.


class ThoughtBaseline(nn.Module):
    """States [n, H] → guesses [n]; 0 until it is trained. layers: 1 is a linear guess."""

    def __init__(self, states: int, *, layers: int, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            widths = [states, *[width] * (layers - 1)]
            hidden = [part for one, other in pairwise(widths) for part in (nn.Linear(one, other), nn.Tanh())]
            last = nn.Linear(widths[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*hidden, last)

    def forward(self, states: Tensor) -> Tensor:
        guesses: Tensor = self.network(states)
        return guesses.squeeze(-1)


def pooled(states: Tensor, row: Tensor) -> Tensor:
    """Return the mean of the states of a thought up to each of its tokens, [n, H].

    row: int64 [n], rising. What comes later is left out: a guess that knew it would bias the gradient.
    """
    sums = states.cumsum(0)
    places = torch.arange(len(row))
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = row[1:] != row[:-1]
    first = places[begins][row.unique_consecutive(return_inverse=True)[1]]
    before = sums[first] - states[first]
    return (sums - before) / (places - first + 1).unsqueeze(1)
