"""Reward models and policies from feedback, from Python: data sets, a reward model, a trainer.

    from penstock.workloads.rlhf.api import RLHFTrainer, TrainingConfig

    result = RLHFTrainer(TrainingConfig("penstock/recipes/service/rlhf.toml",
    feedback="feedback.jsonl")).train() print(result.policy_path, result.reward_mean)

Data sets and reward models are made in this process, which loads torch. A policy is trained by the processes
of `penstock train`. Places are those of the command line: JSON lines, Parquet, a data set's folder, or a
registry's URL. ConfigurationError names what cannot be used, and a remedy.
"""

import json
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from penstock.config.settings import ConfigurationError
from penstock.training import Job, estimate, lay_over, start
from penstock.training import TrainingConfig as RunConfig
from penstock.training import TrainingResult as RunResult
from penstock.workloads.language.feedback import BadRows, Source, scale_of
from penstock.workloads.language.reward.reward_model import Collate, Item, RewardModel
from penstock.workloads.language.reward.training import Order, read_data, train
from penstock.workloads.language.settings import RewardTraining, training_settings
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer
from penstock.workloads.rlhf.preparation import MANIFEST, REWARD_MODEL, absolute
from penstock.workloads.rlhf.responses import Prompts, read_prompts

__all__ = [
    "DatasetConfig",
    "FeedbackDataset",
    "RLHFTrainer",
    "RewardModel",
    "RewardModelConfig",
    "TrainingConfig",
    "TrainingResult",
    "prepare_feedback_dataset",
    "prepare_ppo_dataset",
    "train_reward_model",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """How feedback and prompts are read.

    model: folder or hub name of the model whose tokenizer is used. scale: of the scores (thumbs, stars,
    percent, LOW:HIGH, none). max_tokens: of the longest row. validation_share: share of the examples, or of
    the prompts, that is held out. key: read only ratings of this aspect. part: split of a data set, or policy
    of a registry.
    """

    model: str
    scale: str = "0:1"
    max_tokens: int = 1024
    validation_share: float = 0.2
    seed: int = 0
    key: str | None = None
    part: str | None = None


class FeedbackDataset(Dataset[Item]):
    """Encoded examples for training or for validation. `collate` makes batches of them."""

    def __init__(self, items: list[Item], bad: BadRows, pad_id: int) -> None:
        """bad: unusable rows of the source."""
        self.items, self.bad = items, bad
        self._collate = Collate(pad_id)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]

    def collate(self, items: list[Item]) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, int64 [S + 2P, T], and `targets`, float32 [S].

        S is the number of scores, P of pairs, T of tokens. It is the `collate_fn` of a DataLoader.
        """
        return self._collate(items)


def prepare_feedback_dataset(place: str, config: DatasetConfig) -> tuple[FeedbackDataset, FeedbackDataset]:
    """Return examples for training and for validation, which share no prompt."""
    tokenizer = load_tokenizer(config.model)
    training = _checked(
        {"validation_share": config.validation_share, "seed": config.seed, "max_tokens": config.max_tokens}
    )
    order = Order(source=_source(place, config), base=config.model, out=Path(), settings=training)
    data = read_data(order, Encoder(tokenizer, config.max_tokens))
    train_side, validation = (
        FeedbackDataset(items, data.bad, tokenizer.pad_token_id) for items in (data.train, data.validation)
    )
    return train_side, validation


def prepare_ppo_dataset(place: str, config: DatasetConfig) -> Prompts:
    """Return the distinct prompts of a place as token ids, for training and held out."""
    encoder = Encoder(load_tokenizer(config.model), config.max_tokens)
    return read_prompts(place, encoder, held_out=config.validation_share, seed=config.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """The options of a reward model.

    model: folder or hub name of the transformer under its head. scale, key, part: see DatasetConfig.
    settings: keys of `penstock rlhf reward train --set`, such as `{"epochs": 3}`.
    """

    model: str
    scale: str = "0:1"
    key: str | None = None
    part: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None


def train_reward_model(
    place: str,
    config: RewardModelConfig,
    out: Path,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
) -> RewardModel:
    """Train a reward model from the feedback of a place, write it to the folder `out`, and return it.

    stop: when it is set, the training writes a checkpoint, from which `resume` continues, and raises
    Interrupted.
    """
    order = Order(
        source=_source(place, config),
        base=config.model,
        out=out,
        settings=_checked(config.settings),
        resume=resume,
        device=config.device,
    )
    train(order, stop)
    return RewardModel.load(out)


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The options of a policy's training from feedback.

    recipe: a file for `penstock train`, or a template of the gateway such as those of
    `penstock/recipes/service`. model: replaces the recipe's. max_steps: updates of the policy; None: those of
    the recipe. reward_model: folder of an existing one; None: one is trained from the feedback. settings:
    replace those of the recipe, nested as in TOML. run_dir: folder of the run; None: a new one below `runs`.
    """

    recipe: str | Path
    feedback: str | Path
    scale: str = "0:1"
    model: str | Path | None = None
    reward_model: str | Path | None = None
    max_steps: int | None = None
    learning_rate: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a training. reward_mean, reward_std: of the last evaluation; None: there was none.

    policy_path, reward_model_path: folders in Hugging Face's format. summary: all of `summary.json`.
    """

    policy_path: Path
    reward_model_path: Path | None
    training_steps: int
    reward_mean: float | None
    reward_std: float | None
    summary: Mapping[str, Any]


class RLHFTrainer:
    """Trains a policy from feedback with the processes of `penstock train`."""

    def __init__(self, config: TrainingConfig) -> None:
        """Raises ConfigurationError for a recipe that cannot be read."""
        self.config = config
        self.run_config = _run_config(config)

    def estimate(self) -> dict[str, Any]:
        """Return the estimate of `penstock train --dry-run --json`.

        Raises penstock.training.TrainingFailed.
        """
        return estimate(self.run_config)

    def start(self) -> Job:
        """Start the training and return at once; `Job.result` waits for its end."""
        return start(self.run_config)

    def train(self, timeout_s: float | None = None) -> TrainingResult:
        """Train, and return the result.

        Raises TimeoutError after `timeout_s` seconds, while the training continues;
        penstock.training.TrainingFailed; ConfigurationError where it ended without a policy.
        """
        return self.result(self.start().result(timeout_s))

    @staticmethod
    def result(ended: RunResult) -> TrainingResult:
        """Return the result of an ended training.

        Raises ConfigurationError where it has no policy.
        """
        manifest = ended.run_dir / MANIFEST
        policy = json.loads(manifest.read_text())["policy"] if manifest.exists() else None
        if policy is None:
            raise ConfigurationError(
                f"{ended.run_dir}: has no final policy: go on with `penstock train --resume`"
            )
        reward_model = ended.run_dir / REWARD_MODEL
        evaluation = ended.summary.get("evaluation") or {}
        return TrainingResult(
            policy_path=ended.run_dir / policy,
            reward_model_path=reward_model if reward_model.is_dir() else None,
            training_steps=ended.updates or 0,
            reward_mean=evaluation.get("mean"),
            reward_std=evaluation.get("std"),
            summary=ended.summary,
        )


def _source(place: str, config: DatasetConfig | RewardModelConfig) -> Source:
    return Source(place=place, scale=scale_of(config.scale), key=config.key, part=config.part)


def _checked(settings: Mapping[str, Any]) -> RewardTraining:
    return training_settings(tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def _run_config(config: TrainingConfig) -> RunConfig:
    recipe = _read(Path(config.recipe))
    places = {"feedback": config.feedback, "model": config.model, "reward": config.reward_model}
    kwargs = {name: absolute(str(place)) for name, place in places.items() if place is not None}
    changes: dict[str, Any] = {"environment": {"kwargs": {**kwargs, "feedback_scale": config.scale}}}
    if config.max_steps is not None:
        rows = recipe["algorithm"]["batch_steps"]
        changes["learner"] = {"total_updates": config.max_steps, "total_steps": config.max_steps * rows}
    if config.learning_rate is not None:
        changes["algorithm"] = {"learning_rate": config.learning_rate}
    lay_over(recipe, changes)
    lay_over(recipe, config.settings)
    return RunConfig(recipe["environment"]["id"], settings=recipe, run_dir=config.run_dir)


def _read(file: Path) -> dict[str, Any]:
    """Return a recipe, without the section `template` of a gateway's template."""
    try:
        recipe = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: cannot be read as TOML: {error}") from error
    recipe.pop("template", None)
    for section, key in (("environment", "id"), ("algorithm", "batch_steps")):
        if not isinstance(recipe.get(section), dict) or key not in recipe[section]:
            raise ConfigurationError(f'{file}: {section}.{key} is missing: name a recipe of workload "rlhf"')
    return recipe
