"""Thumbs as they are, without a reward model: a policy is moved towards answers that were liked, KTO.

With r = log π(y|x) − log π_ref(y|x), z the mean of r over answers that stand at other questions, at least 0,

    loss = mean(1 − σ(β (r − z)) where the thumb is up, 1 − σ(β (z − r)) where it is down)

which is Ethayarajh et al. (2024) with weights that make up for unequal numbers of thumbs.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, get_peft_model

from benchmarks.satisfaction_stage import Said, Speaker, answers_log_prob

BETA: Final = 0.1
EPOCHS: Final = 2
BATCH: Final = 64


def weigh(base: Speaker, answers: Sequence[Said], thumbs: Sequence[bool], *, step: float, seed: int) -> Any:
    """Return a network with an adapter that has learned from one thumb for each answer. step: of Adam."""
    torch.manual_seed(seed)
    shape = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules="all-linear")
    network = get_peft_model(base.network, shape)
    up = torch.tensor(thumbs)
    weights = torch.where(up, len(up) / (2 * up.sum()), len(up) / (2 * (~up).sum()))
    with torch.no_grad(), network.disable_adapter():
        began = answers_log_prob(network, base.encoder, answers)
    optimiser = torch.optim.Adam((one for one in network.parameters() if one.requires_grad), lr=step)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(answers)).split(BATCH):
            own = [answers[row] for row in rows.tolist()]
            gained = answers_log_prob(network, base.encoder, own) - began[rows]
            moved = BETA * (gained - _drift(network, base, own))
            value = torch.where(up[rows], moved, -moved).sigmoid()
            loss = (weights[rows] * (1 - value)).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return network.eval()


@torch.no_grad()
def _drift(network: Any, base: Speaker, own: Sequence[Said]) -> torch.Tensor:
    """Return how far answers at the next question have moved, at least 0: an estimate of the KL."""
    turned = [
        Said(asked.prompt, one.text, one.ids, one.ended)
        for asked, one in zip([*own[1:], own[0]], own, strict=True)
    ]
    now = answers_log_prob(network, base.encoder, turned)
    with network.disable_adapter():
        before = answers_log_prob(network, base.encoder, turned)
    return (now - before).mean().clamp(min=0)
