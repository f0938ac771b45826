"""Distributions of choices and bits."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.policy.acting.choice_drawing import (
    BernoulliDrawing,
    CategoricalDrawing,
    MultiCategoricalDrawing,
)
from penstock.policy.distributions.head import ActionHead, ClosedForm, joint
from penstock.policy.numbers import Numbers, names_of
from penstock.protocol.spaces import Discrete, MultiDiscrete


class Categorical(CategoricalDrawing, ActionHead):
    """One of n choices; parameters are logits."""

    has_slope = True

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-softmax at the index, [...]."""
        return functional.log_softmax(parameters, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return −Σ p log p, [...]."""
        log_p = functional.log_softmax(parameters, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def closed_form(self, parameters: Numbers, action: Numbers) -> ClosedForm:
        """Return log π(a), with ∂log π(a)/∂z = 1[a] − p and ∂H/∂z = −p (log p + H).

        Raises IndexError, or for tensors on the CPU RuntimeError, for an action that is none of the choices.
        """
        names, log_p = names_of(parameters), _log_softmax(parameters)
        # Choice by choice in memory, as a dense network's outputs are.
        taken = (names.arange(self.size, device=action.device)[:, None] == action).T
        probability = names.exp(log_p)

        def slopes(by_log_prob: Numbers, by_entropy: float) -> tuple[Numbers, list[Numbers]]:
            rows = by_log_prob[:, None]
            slope = taken * rows - probability * rows
            if by_entropy:
                entropy = -(probability * log_p).sum(-1)
                slope -= by_entropy * probability * (log_p + entropy[:, None])
            return slope, []

        return ClosedForm(_taken(log_p, taken, action), slopes)


class MultiCategorical(MultiCategoricalDrawing, ActionHead):
    """Independent categoricals; their logits stand behind one another."""

    has_slope = True

    def __init__(self, path: str, space: MultiDiscrete) -> None:
        super().__init__(path, space)
        self.parts = [Categorical(path, Discrete(n)) for n in space.nvec]

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the sum over the parts."""
        pieces = zip(self.parts, self.cuts, action.long().unbind(-1), strict=True)
        return torch.stack([part.log_prob(parameters[..., cut], a) for part, cut, a in pieces]).sum(0)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the sum over the parts."""
        pieces = zip(self.parts, self.cuts, strict=True)
        return torch.stack([part.entropy(parameters[..., cut]) for part, cut in pieces]).sum(0)

    def closed_form(self, parameters: Numbers, action: Numbers) -> ClosedForm:
        """Return the sum over the parts, and their slopes behind one another."""
        pieces = zip(self.parts, self.cuts, action.T, strict=True)
        return joint([part.closed_form(parameters[:, cut], a) for part, cut, a in pieces])


class Bernoulli(BernoulliDrawing, ActionHead):
    """Independent bits; parameters are a logit for each."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return Σ log σ(±logit)."""
        return functional.logsigmoid(torch.where(action.bool(), parameters, -parameters)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Σ softplus(x) − x σ(x)."""
        return (functional.softplus(parameters) - parameters * parameters.sigmoid()).sum(-1)


def _log_softmax(parameters: Numbers) -> Numbers:
    """[n, size], over the last axis."""
    if isinstance(parameters, Tensor):
        return functional.log_softmax(parameters, -1)
    shifted = parameters - np.maximum.reduce(parameters, -1)[:, None]
    shifted -= np.log(np.add.reduce(np.exp(shifted), -1))[:, None]
    return shifted


def _taken(log_p: Numbers, taken: Numbers, action: Numbers) -> Numbers:
    """Return log p [n, size] of the actions [n], [n]. taken: whether a choice is the action, [n, size]."""
    if isinstance(log_p, Tensor):
        return log_p.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
    # The sum would be 0, an action that is certain.
    if np.count_nonzero(taken.T) != len(action):
        raise IndexError(f"an action is none of {log_p.shape[-1]} choices")
    return (taken * log_p).sum(-1)
