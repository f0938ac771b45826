"""PPO's epochs in plain torch and nothing else: the yardstick of `benchmarks.update`.

Per epoch a permutation, and for each minibatch, a contiguous piece of the permuted rows: forward of actor
and critic, the clipped policy loss plus the value loss, backward by autograd, `clip_grad_norm_`,
`torch.optim.Adam`. Advantages and targets are given; no metrics, no checks of finiteness, no way back.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from penstock.config.settings import PPOSection

KINDS: Final = ("fused", "foreach")
_OBSERVATIONS: Final = 4
_ACTIONS: Final = 2
_HIDDEN: Final = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that an update learns from.

    observation: [n, 4].
    action: int64 [n].
    columns: [3, n], log-probability, advantage, value target.
    """

    observation: Tensor
    action: Tensor
    columns: Tensor


def made_up(count: int) -> Rows:
    """Return random rows with standardised advantages."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn((3, count), generator=generator)
    columns[0] = -torch.log(torch.tensor(2.0))
    columns[1] = (columns[1] - columns[1].mean()) / columns[1].std()
    return Rows(
        observation=torch.randn((count, _OBSERVATIONS), generator=generator),
        action=torch.randint(0, _ACTIONS, (count,), generator=generator),
        columns=columns,
    )


class Loop:
    """Runs all epochs over `rows`; kind: one of KINDS, of torch's Adam."""

    def __init__(self, rows: Rows, section: PPOSection, kind: str) -> None:
        self._rows = rows
        self._section = section
        self._actor, self._critic = _tower(_ACTIONS), _tower(1)
        self._parameters = [*self._actor.parameters(), *self._critic.parameters()]
        self._adam = torch.optim.Adam(
            self._parameters,
            lr=section.learning_rate,
            eps=section.adam_epsilon,
            fused=kind == "fused",
            foreach=kind == "foreach",
        )

    def update(self) -> None:
        """Make one update."""
        rows, pieces = self._rows, self._section.minibatches
        for _ in range(self._section.epochs):
            order = torch.randperm(len(rows.action))
            observation, action = rows.observation[order], rows.action[order]
            columns = rows.columns[:, order]
            for part in zip(
                observation.chunk(pieces), action.chunk(pieces), columns.chunk(pieces, 1), strict=True
            ):
                self._step(*part)

    def _step(self, observation: Tensor, action: Tensor, columns: Tensor) -> None:
        old_log_prob, advantage, target = columns
        logits, value = self._actor(observation), self._critic(observation).squeeze(1)
        log_prob = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        ratio, clip = (log_prob - old_log_prob).exp(), self._section.clip_range
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        error = 0.5 * (value - target).square().mean()
        self._adam.zero_grad()
        (self._section.value_coefficient * error - surrogate).backward()
        nn.utils.clip_grad_norm_(self._parameters, self._section.max_gradient_norm)
        self._adam.step()


def _tower(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(_OBSERVATIONS, _HIDDEN),
        nn.Tanh(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.Tanh(),
        nn.Linear(_HIDDEN, outputs),
    )
