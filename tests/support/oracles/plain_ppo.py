"""A plain PPO: the learner's oracle. Written for reading, in float64, importing nothing from `learner`.

One class, no batching tricks: loops over columns and steps for advantages, `torch.nn` and
`torch.optim.Adam` for the rest. It is given fragments' arrays and the permutations of the minibatches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class PlainPPO:
    """Actor and critic of two hidden tanh layers each, discrete actions."""

    def __init__(
        self,
        actor: Sequence[tuple[Tensor, Tensor]],
        critic: Sequence[tuple[Tensor, Tensor]],
        settings: Any,
    ) -> None:
        """Start from weights and biases per layer. settings: numbers of the algorithm, as in any paper."""
        self.settings = settings
        self.actor, self.critic = _network(actor), _network(critic)
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.adam = torch.optim.Adam(parameters, lr=settings.learning_rate, eps=settings.adam_epsilon)
        self.seen: list[np.ndarray[Any, Any]] | None = None

    def normalise_observations(self) -> None:
        """Standardise observations by the mean and variance of all steps of earlier updates."""
        self.seen = []

    def update(self, fragments: Sequence[Mapping[str, Any]], permutations: Sequence[Tensor]) -> None:
        """All epochs over one batch: the steps of each fragment side by side, row by row."""
        rows = self._rows(fragments)
        for permutation in permutations:
            count = len(permutation)
            edges = [count * i // self.settings.minibatches for i in range(self.settings.minibatches + 1)]
            for i in range(self.settings.minibatches):
                self._gradient_step(
                    {name: r[permutation[edges[i] : edges[i + 1]]] for name, r in rows.items()}
                )
        if self.seen is not None:
            self.seen += [f["observation"][:-1].reshape(-1, f["observation"].shape[-1]) for f in fragments]

    def _gradient_step(self, rows: Mapping[str, Tensor]) -> None:
        s = self.settings
        distribution = torch.distributions.Categorical(logits=self.actor(rows["observation"]))
        log_prob = distribution.log_prob(rows["action"])
        if s.objective == "decoupled":
            ratio = torch.exp(log_prob - rows["proximal"])
            weight = torch.clamp(torch.exp(rows["proximal"] - rows["behaviour"]), max=s.behaviour_weight_cap)
        else:
            ratio = torch.exp(log_prob - rows["behaviour"])
            weight = torch.ones_like(ratio)
        unclipped = ratio * rows["advantage"]
        clipped = torch.clamp(ratio, 1 - s.clip_range, 1 + s.clip_range) * rows["advantage"]
        policy_loss = -(weight * torch.min(unclipped, clipped)).mean()
        value = self.critic(rows["observation"])[:, 0]
        error = (value - rows["target"]) ** 2
        if s.value_clip is not None:
            near = rows["value"] + torch.clamp(value - rows["value"], -s.value_clip, s.value_clip)
            error = torch.max(error, (near - rows["target"]) ** 2)
        loss = policy_loss + s.value_coefficient * 0.5 * error.mean()
        loss = loss - s.entropy_coefficient * distribution.entropy().mean()
        self.adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*self.actor.parameters(), *self.critic.parameters()], s.max_gradient_norm)
        self.adam.step()

    @torch.no_grad()
    def _rows(self, fragments: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Every step of the batch in the order step by step, column by column within it."""
        parts: dict[str, list[Tensor]] = {}
        for fragment in fragments:
            for name, tensor in self._columns(fragment).items():
                parts.setdefault(name, []).append(tensor)
        rows = {name: torch.cat(tensors, 1).flatten(0, 1) for name, tensors in parts.items()}
        if self.settings.normalise_advantages:
            advantage = rows["advantage"]
            rows["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return rows

    def _columns(self, fragment: Mapping[str, Any]) -> dict[str, Tensor]:
        """What one fragment [T, N] gives the losses."""
        steps = len(fragment["reward"])
        observation = self._observation(fragment["observation"])
        action = torch.as_tensor(np.array(fragment["action"]))
        proximal = torch.distributions.Categorical(logits=self.actor(observation[:-1])).log_prob(action)
        behaviour = torch.as_tensor(np.array(fragment["log_prob"])).double()
        value = self.critic(observation)[..., 0]
        final = {}
        for row, (slot, step) in enumerate(zip(fragment["final/slot"], fragment["final/step"], strict=True)):
            last = self._observation(fragment["final/observation"][row : row + 1])
            final[int(step), int(slot)] = float(self.critic(last)[0, 0])
        advantage, target = torch.zeros_like(behaviour), torch.zeros_like(behaviour)
        for column in range(behaviour.shape[1]):
            ratios = torch.exp(proximal - behaviour)[:, column].tolist()
            estimate = self._estimate(fragment, column, value[:, column].tolist(), final, ratios)
            for t in range(steps):
                advantage[t, column], target[t, column] = estimate[t]
        return {
            "observation": observation[:-1],
            "action": action,
            "proximal": proximal,
            "behaviour": behaviour,
            "value": value[:-1],
            "advantage": advantage,
            "target": target,
        }

    def _estimate(
        self,
        fragment: Mapping[str, Any],
        column: int,
        value: list[float],
        final: Mapping[tuple[int, int], float],
        ratios: list[float],
    ) -> list[tuple[float, float]]:
        """(advantage, target) of each step of a column, last step first."""
        s = self.settings
        result = []
        later, later_value = 0.0, 0.0
        for t in reversed(range(len(fragment["reward"]))):
            terminated, truncated = fragment["terminated"][t, column], fragment["truncated"][t, column]
            ends = bool(terminated or truncated)
            follows = 0.0 if terminated else final[t, column] if truncated else value[t + 1]
            reward = float(fragment["reward"][t, column])
            delta = reward + s.discount * follows - value[t]
            carried = 0.0 if ends else later
            if s.advantage == "vtrace":
                weight = min(1.0, ratios[t])
                next_target = follows if ends or t + 1 == len(fragment["reward"]) else later_value
                later = weight * delta + s.discount * s.gae_lambda * weight * carried
                later_value = value[t] + later
                result.append((reward + s.discount * next_target - value[t], later_value))
            else:
                later = delta + s.discount * s.gae_lambda * carried
                result.append((later, later + value[t]))
        return result[::-1]

    def _observation(self, raw: Any) -> Tensor:
        observation = torch.as_tensor(np.array(raw)).double()
        if self.seen is None:
            return observation
        mean, variance = torch.zeros(observation.shape[-1]), torch.ones(observation.shape[-1])
        if self.seen:
            steps = np.concatenate(self.seen).astype(np.float64)
            mean, variance = torch.as_tensor(steps.mean(0)), torch.as_tensor(steps.var(0))
        return ((observation - mean) / torch.sqrt(variance.double() + 1e-8)).clamp(-10, 10)


def _network(layers: Sequence[tuple[Tensor, Tensor]]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for weight, bias in layers:
        linear = nn.Linear(weight.shape[1], weight.shape[0]).double()
        linear.weight.data.copy_(weight)
        linear.bias.data.copy_(bias)
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules[:-1])
