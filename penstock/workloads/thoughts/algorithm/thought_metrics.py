"""Figures of an update under their names: thirteen as `rl/…`, then what this system adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from penstock.workloads.thoughts.algorithm.thought_rows import ThoughtRows
from penstock.workloads.thoughts.thought_layout import Layout

ORIGINAL: Final = (
    "rl/episode",
    "rl/reward",
    "rl/avg_reward_100",
    "rl/policy_loss",
    "rl/value_loss",
    "rl/entropy",
    "rl/entropy_coefficient",
    "rl/advantages",
    "rl/kl_divergence",
    "rl/total_loss",
    "rl/num_thoughts",
    "rl/coherence",
    "rl/learning_rate",
)
"""`rl/episode`: updates. `rl/reward`: mean over the batch, in nats. `rl/avg_reward_100`: its mean over the
last 100 updates. `rl/kl_divergence`: of the policy from its start where `kl_coefficient` is above 0, else
from the weights that sampled, in nats per token. `rl/num_thoughts`: thoughts of the batch that are not
empty."""
METRICS: Final = (
    *ORIGINAL,
    "policy_loss",
    "entropy",
    "gradient_norm",
    "learning_rate",
    "entropy_coefficient",
    "kl_behaviour",
    "effective_sample_size",
    "score",
    "gain",
    "reward_difference",
    "loss_with_thought",
    "loss_without_thought",
    "answers_right",
    "direct_answers_right",
    "thought_length",
    "thought_share",
    "left_out",
)
"""`gain`: unclipped reward. `reward_difference`: mean |reward of the actor − reward of the learner|, in nats.
`loss_with_thought`, `loss_without_thought`: of the true answer, in nats. `thought_length`: words of a thought
without the mark that ends it. `thought_share`: what the mixing head takes of an answer from behind a thought,
0 … 1; 1 without one. `left_out`: columns that are no row of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Terms of the loss of one update, each a scalar tensor, and what it was made of.

    policy, with_thought, direct, value, entropy, divergence: before their weights.
    """

    total: Tensor
    policy: Tensor
    with_thought: Tensor
    direct: Tensor
    value: Tensor
    entropy: Tensor
    divergence: Tensor


def of_losses(losses: Losses) -> dict[str, float]:
    """Return the losses under their names."""
    policy, entropy = float(losses.policy.detach()), float(losses.entropy.detach())
    return {
        "rl/policy_loss": policy,
        "rl/value_loss": float(losses.value.detach()),
        "rl/entropy": entropy,
        "rl/kl_divergence": float(losses.divergence.detach()),
        "rl/total_loss": float(losses.total.detach()),
        "policy_loss": policy,
        "entropy": entropy,
        "loss_with_thought": float(losses.with_thought.detach()),
        "loss_without_thought": float(losses.direct.detach()),
    }


def of_thoughts(rows: ThoughtRows, layout: Layout) -> dict[str, float]:
    """Return how many thoughts there are, how long, and what was no thought."""
    lengths = [len(layout.said(thought)) for thought in rows.thoughts]
    return {
        "rl/num_thoughts": float(sum(length > 0 for length in lengths)),
        "thought_length": float(np.mean(lengths)),
        "left_out": float(rows.left_out),
    }


def average(recent: Sequence[float]) -> float:
    """Return the mean of recent rewards."""
    return float(np.mean(recent))
