"""A network that guesses the reward of a thought from the states of the model."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class ThoughtBaseline(nn.Module):
    """States [n, H] → guesses [n]; 0 until it is trained.

    layers: 1 is a linear guess. width: of those between.
    """

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
        """Return the guesses [n] of states [n, H], in nats."""
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
