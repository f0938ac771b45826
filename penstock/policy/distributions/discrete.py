"""Distributions of choices and bits."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.policy.acting.choice_drawing import (
    BernoulliDrawing,
    CategoricalDrawing,
    MultiCategoricalDrawing,
)
from penstock.policy.distributions.head import ActionHead
from penstock.wire.spaces import Discrete, MultiDiscrete


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

    def slope(self, parameters: Tensor, action: Tensor, by_log_prob: Tensor, by_entropy: float) -> Tensor:
        """Return ∂L/∂z with ∂log π(a)/∂z = 1[a] − p and ∂H/∂z = −p (log p + H)."""
        log_p = functional.log_softmax(parameters, -1)
        probability, rows = log_p.exp(), by_log_prob.unsqueeze(-1)
        slope = (probability * rows).neg_().scatter_add_(-1, action.unsqueeze(-1), rows)
        if by_entropy:
            entropy = -(probability * log_p).sum(-1, keepdim=True)
            slope.addcmul_(probability, log_p.add_(entropy), value=-by_entropy)
        return slope


class MultiCategorical(MultiCategoricalDrawing, ActionHead):
    """Independent categoricals; their logits stand behind one another."""

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


class Bernoulli(BernoulliDrawing, ActionHead):
    """Independent bits; parameters are a logit for each."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return Σ log σ(±logit)."""
        return functional.logsigmoid(torch.where(action.bool(), parameters, -parameters)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Σ softplus(x) − x σ(x)."""
        return (functional.softplus(parameters) - parameters * parameters.sigmoid()).sum(-1)
