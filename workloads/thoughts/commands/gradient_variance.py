"""`penstock thoughts variance RUN`: how noisy the gradient of REINFORCE is with each baseline.

The questions are fixed and their thoughts are drawn anew, so that what varies between gradients is what a
baseline is to take away. The gradient is that of the policy term alone, of all trained weights. A learned
baseline is fitted first, on thoughts of other questions.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import local_settings
from penstock.runtime.exit import EXIT_OK
from workloads.language.quiet import quieten
from workloads.thoughts.algorithm.thought_advantage import gae_advantages, return_advantages, rewards
from workloads.thoughts.algorithm.thought_baseline import ThoughtBaseline
from workloads.thoughts.commands.condition_runs import final_network, start_of
from workloads.thoughts.start.transformer import load_transformer
from workloads.thoughts.tasks.example import Example, Task, draw_mixed
from workloads.thoughts.thinking_model import ThinkingModel, answer_places, outputs
from workloads.thoughts.thought_environment import task_of
from workloads.thoughts.thought_section import thoughts_section

QUESTIONS: Final = 32
GROUP: Final = 4
_FITTED: Final = 60
_LAMBDA: Final = 0.95
_BOUND: Final = 5.0
_SEED: Final = 5_000_000
_DEPTHS: Final = {"learned, 2 layers": 2, "learned, 4 layers": 4}


def main(run: Path, *, draws: int, at_start: bool, trust: bool) -> int:
    """Print the total variance of the gradient with each baseline, beside that with none.

    at_start: of the model that the run began with. Raises ConfigurationError for a folder without a run of
    thoughts that has ended.
    """
    quieten()
    torch.set_num_threads(1)
    if not (run / CONFIG_FILE).exists():  # such a folder has the defaults, which are of another workload
        raise ConfigurationError(
            f"{run}: holds no {CONFIG_FILE}, so no run; name the folder of a run of thoughts"
        )
    settings = local_settings(run, trust=trust)
    if settings.workload != "thoughts":
        raise ConfigurationError(f"{run}: its workload is {settings.workload!r}; name a run of thoughts")
    environment = settings.environment
    task, layout = task_of(environment)
    section = thoughts_section(environment)
    start = start_of(run, section)
    try:
        network = load_transformer(start) if at_start else final_network(run, start)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    found = measure(ThinkingModel(network, layout), task, section.thought_tokens, draws=draws)
    none = found["none"]
    for name, variance in found.items():
        sys.stdout.write(f"{name:20} {variance:12.5g}  {100 * variance / none:6.0f}%\n")
    return EXIT_OK


def measure(model: ThinkingModel, task: Task, most: int, *, draws: int) -> Mapping[str, float]:
    """Return the total variance of the policy gradient over draws of thoughts, by baseline.

    draws: batches of thoughts on the same questions, 2 at least. Sums over all weights.
    """
    random = np.random.default_rng(_SEED)
    model.seed(_SEED)
    baselines = {name: _fitted(model, task, most, random, layers) for name, layers in _DEPTHS.items()}
    examples = [one for one in draw_mixed(task, random, QUESTIONS) for _ in range(GROUP)]
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(draws):
        drawn = _Drawn(model, examples, most)
        for name, advantage in drawn.advantages(baselines).items():
            gradients.setdefault(name, []).append(drawn.gradient(advantage))
    return {name: float(torch.stack(rows).var(0).sum()) for name, rows in gradients.items()}


class _Drawn:
    """One draw of thoughts on questions, with its rewards."""

    def __init__(self, model: ThinkingModel, examples: list[Example], most: int) -> None:
        self._model = model
        questions, answers = model.questions(examples), model.answers(examples)
        thoughts = model.think(questions, most)
        assert thoughts is not None, "nothing ends it early"
        layout = model.layout
        with_thought = torch.from_numpy(model.answered(questions, thoughts, answers).log_prob).float()
        without = torch.from_numpy(model.answered(questions, None, answers).log_prob).float()
        self.reward = rewards(with_thought, without, bound=_BOUND)
        counts = [len(one) for one in thoughts]
        rows = [layout.begun(*one) for one in zip(questions, thoughts, strict=True)]
        found = outputs(model.network, rows, answer_places(rows, counts), layout.pad)
        action = torch.tensor([token for one in thoughts for token in one])
        self._log_prob = found.log_probs.gather(1, action[:, None])[:, 0]
        self.states = found.states.detach()
        self.row = torch.arange(len(thoughts)).repeat_interleave(torch.tensor(counts))
        self._group = torch.arange(len(thoughts)) // GROUP
        self._last = torch.from_numpy(np.cumsum(counts) - 1)

    def advantages(self, baselines: Mapping[str, ThoughtBaseline]) -> dict[str, Tensor]:
        """Return the advantage of each token by each baseline, [n]."""
        reward, row, group = self.reward, self.row, self._group
        found = {
            "none": return_advantages(reward, row, group, value=None, is_grouped=False),
            "group": return_advantages(reward, row, group, value=None, is_grouped=True),
        }
        with torch.no_grad():
            values = {name: baseline(self.states) for name, baseline in baselines.items()}
        for name, value in values.items():
            found[name] = return_advantages(reward, row, group, value=value, is_grouped=False)
        shallow = next(iter(values.values()))
        found["both"] = return_advantages(reward, row, group, value=shallow, is_grouped=True)
        found["gae"] = gae_advantages(reward, shallow, row, self._last, discount=1.0, gae_lambda=_LAMBDA)
        return found

    def gradient(self, advantage: Tensor) -> Tensor:
        """Return the gradient of the policy term, all weights as one row."""
        loss = -(advantage * self._log_prob).mean()
        weights = [one for one in self._model.network.parameters() if one.requires_grad]
        pieces = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
        return torch.cat([piece.flatten() for piece in pieces])


def _fitted(model: ThinkingModel, task: Task, most: int, random: Any, layers: int) -> ThoughtBaseline:
    """Return a baseline that has learned from thoughts on other questions."""
    width = int(model.network.config.get_text_config().hidden_size)
    baseline = ThoughtBaseline(width, layers=layers, width=256, seed=0)
    optimiser = torch.optim.AdamW(baseline.parameters(), lr=1e-3)
    for _ in range(_FITTED):
        drawn = _Drawn(model, draw_mixed(task, random, QUESTIONS * GROUP), most)
        loss = (baseline(drawn.states) - drawn.reward[drawn.row]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return baseline
