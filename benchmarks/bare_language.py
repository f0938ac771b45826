"""PPO of tokens in plain transformers and peft: the yardstick of `benchmarks.language`.

As in a single-file trainer: once per batch the log-probabilities, values and reference of all responses
without gradients, then epochs of minibatches with logits of whole rows, autograd, `clip_grad_norm_` and
`torch.optim.AdamW`. Prompts are all of one length, and so are responses; no metrics, no checks of finiteness,
no way back.
"""

import copy
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.config.sections.token import TokenPPOSection
from workloads.language.policy.policy_section import LanguageSection


class Loop:
    """Makes one update of `tokens` [R, P + L], whose first P are the prompt's, with scores [R]."""

    def __init__(
        self, language: LanguageSection, section: TokenPPOSection, tokens: Tensor, prompt: int
    ) -> None:
        self._section, self._tokens, self._prompt = section, tokens, prompt
        network: Any = AutoModelForCausalLM.from_pretrained(
            language.model, dtype=torch.float32, trust_remote_code=False
        )
        self._reference = None if language.lora else copy.deepcopy(network).requires_grad_(False).eval()
        self.network: Any = _adapted(network, language) if language.lora else network
        self.network.eval()
        width = network.config.hidden_size
        self._head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        own = [one for one in self.network.parameters() if one.requires_grad]
        self._parameters = [*own, *self._head.parameters()]
        groups = [
            {"params": own, "lr": section.learning_rate},
            {"params": list(self._head.parameters()), "lr": section.critic_learning_rate},
        ]
        self._adam = torch.optim.AdamW(groups, eps=section.adam_epsilon, weight_decay=0.0, fused=True)

    def update(self, scores: Tensor) -> None:
        """Run all epochs."""
        with torch.no_grad():
            proximal, value = self._read(self.network, self._tokens)
            reward = -self._section.kl_coefficient * (proximal - self._reference_log_prob())
            reward[:, -1] += scores
            advantage, target = self._gae(reward, value)
            advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
        for _ in range(self._section.epochs):
            for rows in torch.randperm(len(self._tokens)).chunk(self._section.minibatches):
                self._step(self._tokens[rows], proximal[rows], advantage[rows], target[rows])

    def _step(self, tokens: Tensor, proximal: Tensor, advantage: Tensor, target: Tensor) -> None:
        log_prob, value = self._read(self.network, tokens)
        ratio, clip = (log_prob - proximal).exp(), self._section.clip_range
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        error = 0.5 * (value - target).square().mean()
        self._adam.zero_grad()
        (self._section.value_coefficient * error - surrogate).backward()
        nn.utils.clip_grad_norm_(self._parameters, self._section.max_gradient_norm)
        self._adam.step()

    def _read(self, network: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and values of the responses, [R, L] each."""
        outputs = network(input_ids=tokens[:, :-1], output_hidden_states=True, use_cache=False)
        first = self._prompt - 1
        log_probs = outputs.logits[:, first:].log_softmax(-1)
        chosen = log_probs.gather(-1, tokens[:, self._prompt :, None]).squeeze(-1)
        value: Tensor = self._head(outputs.hidden_states[-1][:, first:]).squeeze(-1)
        return chosen, value

    def _reference_log_prob(self) -> Tensor:
        if self._reference is not None:
            return self._read(self._reference, self._tokens)[0]
        with self.network.disable_adapter():
            return self._read(self.network, self._tokens)[0]

    def _gae(self, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return GAE(γ = 1, λ) and returns."""
        advantage, carried = torch.zeros_like(reward), torch.zeros(len(reward))
        following = torch.zeros(len(reward))
        for step in reversed(range(reward.shape[1])):
            carried = reward[:, step] + following - value[:, step] + self._section.gae_lambda * carried
            advantage[:, step], following = carried, value[:, step]
        return advantage, reward.flip(1).cumsum(1).flip(1)


def _adapted(network: Any, language: LanguageSection) -> Any:
    return get_peft_model(
        network,
        LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=language.rank,
            lora_alpha=language.alpha,
            target_modules="all-linear",
        ),
    )
