"""transformers' Trainer for reward models: two losses, their measures, a way out, log lines.

    scored   (s − score)²                                                       regression
    pair     −log σ(s_chosen − s_rejected) + centring · (s_chosen + s_rejected)²    Bradley and Terry (1952)

The loss of a batch is the mean over its examples.
"""

import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)

from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.dataset import Collate, Data, Item
from penstock.workloads.language.reward.measures import Measures, measure
from penstock.workloads.language.reward.reward_model import Network
from penstock.workloads.language.reward.training_section import RewardTraining

log = logging.getLogger(__name__)


class RewardTrainer(Trainer):  # type: ignore[misc]  # transformers comes without types
    """transformers' Trainer with the two losses of a reward model and its measures."""

    control: Any
    loss_is_scaled_for_ga = True
    """`compute_loss` divides by the examples of the whole batch: the Trainer only adds micro-batches up."""

    def __init__(
        self,
        network: Network,
        data: Data,
        settings: RewardTraining,
        *,
        checkpoints: Path,
        device: str | None,
        stop: threading.Event,
    ) -> None:
        """device: "cpu", or a GPU where there is one. stop: ends the training behind the step under way."""
        super().__init__(
            model=network,
            args=_arguments(settings, checkpoints, device, validates=bool(data.validation)),
            data_collator=Collate(network.config.get_text_config().pad_token_id),
            train_dataset=data.train,
            eval_dataset=data.validation or None,
            callbacks=[_Drain(stop), _Progress()],
        )
        self.remove_callback(PrinterCallback)
        if settings.patience and data.validation:
            self.add_callback(EarlyStoppingCallback(settings.patience))
        self.control: TrainerControl  # made by the Trainer
        self._centring = settings.centring
        self._validation = data.validation
        self.measures = Measures()

    def compute_loss(
        self,
        model: Network,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A micro-batch's share of the mean over its batch.

        The last batch of an epoch may be smaller, and its micro-batches of different sizes.
        """
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = loss_of(logits[:, 0].float(), inputs["targets"], self._centring)
        return losses.sum() / (len(losses) if num_items_in_batch is None else num_items_in_batch)

    def get_batch_samples(self, *arguments: Any) -> tuple[list[dict[str, Tensor]], int]:
        """Return the micro-batches of a batch and the number of their examples."""
        parts, _ = super().get_batch_samples(*arguments)
        return parts, sum(_examples(part) for part in parts)

    def evaluate(self, *_arguments: Any, **_named: Any) -> dict[str, float]:
        """Score the validation examples."""
        scores = score_items(self.model, self._validation)
        self.measures = measure([item.example for item in self._validation], scores)
        found = {"loss": validation_loss(self._validation, scores), **self.measures.as_dict()}
        metrics = {f"eval_{name}": value for name, value in found.items() if value is not None}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _examples(inputs: dict[str, Tensor]) -> int:
    """S + P of S + 2P rows."""
    return (len(inputs["input_ids"]) + len(inputs["targets"])) // 2


def loss_of(scores: Tensor, targets: Tensor, centring: float) -> Tensor:
    """Loss of each example, [S + P], from the scores of a batch, [S + 2P], as `Collate` orders them."""
    scored = (scores[: len(targets)] - targets) ** 2
    chosen, rejected = scores[len(targets) :].chunk(2) if len(scores) > len(targets) else (scores[:0],) * 2
    pairs = functional.softplus(rejected - chosen) + centring * (chosen + rejected) ** 2
    return torch.cat([scored, pairs])


def validation_loss(items: Sequence[Item], scores: Sequence[tuple[float, ...]]) -> float:
    """Mean loss without the centring, which says nothing of how good a model is."""
    losses = [
        (given[0] - item.target) ** 2 if item.target is not None else _softplus(given[1] - given[0])
        for item, given in zip(items, scores, strict=True)
    ]
    return sum(losses) / len(losses)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def score_items(network: Network, items: Sequence[Item]) -> list[tuple[float, ...]]:
    """Scores of each item's rows."""
    given = iter(reward_model.score_rows(network, [row for item in items for row in item.rows]))
    return [tuple(next(given) for _ in item.rows) for item in items]


def _arguments(
    settings: RewardTraining, checkpoints: Path, device: str | None, *, validates: bool
) -> TrainingArguments:
    micro = settings.micro_batch or settings.batch
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=settings.batch // micro,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_gradient_norm,
        bf16=on_gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not on_gpu,
        activation_checkpointing=settings.gradient_checkpointing,
        eval_strategy="epoch" if validates else "no",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=validates,
        metric_for_best_model="eval_loss" if validates else None,
        greater_is_better=False if validates else None,
        logging_steps=0.05,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu,
        seed=settings.seed,
        data_seed=settings.seed,
    )


class _Drain(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Ends the training behind the step under way, with a checkpoint."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def on_step_end(self, _args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Called by the Trainer."""
        if self._stop.is_set() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


class _Progress(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Log lines with loss and measures."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_others: Any) -> None:
        """Called by the Trainer."""
        if "train_runtime" in logs:
            return
        what = "validated" if any(name.startswith("eval_") for name in logs) else "training"
        fields = {name.removeprefix("eval_"): value for name, value in logs.items()}
        log.info(what, extra={"step": f"{state.global_step}/{state.max_steps}", **fields})
