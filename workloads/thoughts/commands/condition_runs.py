"""Conditions that learn by reinforcement: runs with all their processes, and what they leave."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomli_w
from numpy.typing import NDArray

from penstock.config.run_folder import CONFIG_FILE
from penstock.config.settings import PolicySection
from penstock.policy.weights import load_into
from penstock.training import TrainingConfig, lay_over, resume, start
from workloads.plugin.serving import read_final
from workloads.thoughts.start.thoughts_start import START_MODEL
from workloads.thoughts.start.transformer import load_transformer
from workloads.thoughts.tasks.example import Example
from workloads.thoughts.thinking_model import ThinkingModel
from workloads.thoughts.thinking_policy import build
from workloads.thoughts.thought_layout import Layout
from workloads.thoughts.thought_section import Thoughts

_SUMMARY: Final = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Of one run. reward_from: as the algorithm has it. more: settings over all others, nested."""

    seed: int
    updates: int
    reward_from: str = "own"
    more: dict[str, Any] | None = None


def train_thoughts(
    recipe: dict[str, Any], model: Path, run_dir: Path, settings: RunSettings
) -> dict[str, Any]:
    """Train thoughts by a recipe from a model on, and return the run's summary.

    A run that has ended in order is not made again, and one that was cut off goes on. A KeyboardInterrupt
    ends it with a checkpoint first. Raises TrainingFailed.
    """
    summary = run_dir / _SUMMARY
    if _has_ended(summary):
        return dict(json.loads(summary.read_text()))
    said = copy.deepcopy(recipe)
    over: dict[str, Any] = {
        "seed": settings.seed,
        "environment": {"kwargs": {"model": str(model)}},
        "algorithm": {"reward_from": settings.reward_from},
        "learner": {"total_updates": settings.updates},
    }
    lay_over(said, over)
    lay_over(said, settings.more or {})
    run_dir.mkdir(parents=True, exist_ok=True)
    # Not `with_suffix`: of 0.01-0 and 0.02-0 it makes the same name.
    file = run_dir.with_name(f"{run_dir.name}.toml")
    file.write_text(tomli_w.dumps(said))
    job = (
        resume(run_dir) if (run_dir / CONFIG_FILE).exists() else start(TrainingConfig(file, run_dir=run_dir))
    )
    try:
        job.result()
    except KeyboardInterrupt:
        job.stop()
        job.result()
        raise
    return dict(json.loads(summary.read_text()))


def _has_ended(summary: Path) -> bool:
    found = json.loads(summary.read_text()) if summary.exists() else {"interrupted": True}
    return not found["interrupted"] and "failure" not in found


def start_of(run_dir: Path, section: Thoughts) -> Path:
    """Return the model that a run began with: the one that it made, wherever its folder lies now."""
    own = run_dir / START_MODEL
    return own if own.is_dir() else Path(section.model)


def final_network(run_dir: Path, model: Path) -> Any:
    """Return the network of a run's final policy, which began as a model; raises ValueError."""
    final = read_final(run_dir)
    said = PolicySection.model_validate_json(final.specification.policy_json)
    section = said.model_copy(update={"kwargs": {**said.kwargs, "model": str(model)}})
    specification = final.specification
    policy = build(specification.observation_space, specification.action_space, section, 0)
    load_into(policy, final.blob)
    return policy.network


def losses_of_start(model: Path, layout: Layout, examples: Sequence[Example]) -> NDArray[np.float64]:
    """Return what the answer of each question cost without a thought when training began, in nats."""
    start = ThinkingModel(load_transformer(model), layout)
    answered = start.answered(start.questions(examples), None, start.answers(examples))
    return -answered.log_prob
