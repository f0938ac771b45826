"""PPO of tokens on a small policy, and experience for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch
from tests.support.experience.token_experience import Response, SmallTokenPolicy, batch_of, fragment, sample

SMOOTH: dict[str, Any] = {"adam_epsilon": 1.0, "learning_rate": 1.0, "critic_learning_rate": 1.0}
"""Settings under which Adam's first steps follow the size of the gradient.

With a small epsilon these steps have one size, even where rounding decides the sign of a gradient next to 0.
"""
PROMPTS = ((2, 3), (2, 4, 5), (2, 3), (2, 6, 7, 8))


def make(policy: SmallTokenPolicy | None = None, **section: Any) -> TokenPPO:
    """One gradient step on everything, unless it is said otherwise."""
    usual: dict[str, Any] = {
        "epochs": 1,
        "minibatches": 1,
        "learning_rate": 1e-2,
        "critic_learning_rate": 1e-2,
    }
    return TokenPPO(policy or SmallTokenPolicy(), TokenPPOSection(**(usual | section)), seed=0)


def responses(policy: SmallTokenPolicy | None = None, count: int = 3, seed: int = 0) -> list[Response]:
    """Of that policy to each prompt, scored by how often token 9 is in them."""
    made = [
        one
        for index, prompt in enumerate(PROMPTS)
        for one in sample(policy or SmallTokenPolicy(), prompt, count, 6, seed + index)
    ]
    return [replace(one, score=one.tokens.count(9) / len(one.tokens) - 0.25) for one in made]


def stale(seed: int = 0) -> Batch:
    """Experience of another policy than the one that learns."""
    return batch_of(fragment(responses(SmallTokenPolicy(7), seed=seed)))


def flat(algorithm: TokenPPO) -> Tensor:
    """All that is trained."""
    everything = (*algorithm.policy.trained().values(), *algorithm.policy.critic.parameters())
    return torch.cat([one.detach().flatten() for one in everything])


def move(policy: SmallTokenPolicy) -> None:
    """Away from its reference."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
