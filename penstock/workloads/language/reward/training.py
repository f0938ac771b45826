"""Trains a reward model from feedback, and writes it with its results.

    feedback ─► examples ─► split by prompt ─► token ids ─► Trainer ─► best weights ─► reference ─► folder

Schedule, clipping, accumulation and mixed precision are those of transformers' Trainer. After each epoch the
validation examples are scored and a checkpoint is written; the weights with the best validation loss are
kept. A drain (Ctrl-C) writes a checkpoint behind the step under way and ends; `resume` goes on from there as
if nothing had been.
"""

import hashlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

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
from transformers.trainer_utils import get_last_checkpoint

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import split, summary
from penstock.workloads.language.feedback.feedback_places import Source, read
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.dataset import Collate, Data, Item, encode
from penstock.workloads.language.reward.reward_model import CARD, CHECKED, Card, Measures, Network, measure
from penstock.workloads.language.reward.training_section import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, load_tokenizer

# ---- transformers' Trainer for reward models: two losses, their measures, a way out, log lines.

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


RESULTS: Final = "training_results.json"
PLAN: Final = "plan.json"
CHECKPOINTS: Final = "checkpoints"
MAX_REFERENCE: Final = 4096
"""Most rows of the reference set that are scored."""
LEAST_STD: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to train from what, and where to.

    reference: rows to take mean and std over; None: the training examples.
    """

    source: Source
    base: str
    out: Path
    settings: RewardTraining = field(default_factory=RewardTraining)
    reference: Source | None = None
    resume: bool = False
    device: str | None = None


def train(
    order: Order, stop: threading.Event, callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any] | None:
    """Train, save and return what `training_results.json` holds; None when `stop` was set first.

    callbacks: told of each step as transformers tells it; they may end the training early. Raises
    ConfigurationError for feedback, a model or a folder that cannot be used.
    """
    began = time.monotonic()
    checkpoint = _prepare(order)
    tokenizer = load_tokenizer(order.base)
    network = reward_model.build(order.base, order.settings, tokenizer.pad_token_id)
    encoder = Encoder(tokenizer, reward_model.max_tokens_of(network, order.settings.max_tokens))
    data = read_data(order, encoder)
    _same_plan(order, data)
    folder = order.out / CHECKPOINTS
    trainer = RewardTrainer(network, data, order.settings, checkpoints=folder, device=order.device, stop=stop)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.is_set():
        log.info("interrupted: go on with --resume", extra={"step": trainer.state.global_step})
        return None
    results = _results(order, trainer, data, encoder)
    results["seconds"] = round(time.monotonic() - began, 1)
    return _save(order, trainer.model, tokenizer, encoder, data, results)


def read_data(order: Order, encoder: Encoder) -> Data:
    """Read, split and encode; raises ConfigurationError when nothing is left of one side."""
    feedback = read(order.source)
    settings = order.settings
    sides = split(feedback.examples, share=settings.validation_share, seed=settings.seed)
    train_items, validation = (encode(side, encoder, feedback.bad) for side in sides)
    for line in feedback.bad.lines():
        log.warning("bad row: %s", line)
    if not train_items or (settings.validation_share and not validation):
        left = "\n".join([f"feedback={order.source.place}: no row is left", *feedback.bad.lines()])
        raise ConfigurationError(left)
    return Data(train_items, validation, feedback.bad, encoder.cut)


def _prepare(order: Order) -> str | None:
    """The checkpoint to go on from; raises ConfigurationError for a folder that does not fit."""
    folder = order.out / CHECKPOINTS
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if (order.out / CARD).exists():
        raise ConfigurationError(
            f"--out {order.out}: holds a trained reward model already: choose another folder"
        )
    if last is not None and not order.resume:
        raise ConfigurationError(
            f"--out {order.out}: holds an interrupted training: go on with --resume, or choose another folder"
        )
    if last is None and order.resume:
        raise ConfigurationError(
            f"--resume: {order.out} holds no checkpoint; one is written after each epoch and on Ctrl-C"
        )
    return last


def _same_plan(order: Order, data: Data) -> None:
    """Write what this training was made from.

    Raises ConfigurationError when a resumed one is made of something else.
    """
    digest = hashlib.sha256()
    for item in (*data.train, *data.validation):
        digest.update(json.dumps([item.rows, item.target]).encode())
    plan = {
        **order.settings.model_dump(mode="json"),
        "model": order.base,
        "feedback": digest.hexdigest(),
    }
    file = order.out / PLAN
    if order.resume:
        was = json.loads(file.read_text())
        for name, value in plan.items():
            if value != was.get(name):
                raise ConfigurationError(
                    f"--resume: {name}={value!r}, and it was begun with {was.get(name)!r}"
                )
        return
    order.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan, indent=1) + "\n")


def _results(order: Order, trainer: RewardTrainer, data: Data, encoder: Encoder) -> dict[str, Any]:
    """Everything but the time that it took."""
    in_full_precision(trainer)
    if data.validation:
        trainer.evaluate()  # of the best weights, which are loaded now
    state = trainer.state
    mean, std = _reference(order, trainer, data, encoder)
    return {
        "model": order.base,
        "scale": order.source.scale.name,
        "feedback": _counted(order.source.place, data),
        "settings": order.settings.model_dump(mode="json"),
        "steps": state.global_step,
        "best_step": _best_step(state),
        "validation": trainer.measures.as_dict() if data.validation else None,
        "validation_loss": state.best_metric,
        "reward_mean": mean,
        "reward_std": std,
        "history": state.log_history,
    }


def in_full_precision(trainer: Any) -> None:
    """Have the network of a trainer compute in the precision of its weights again.

    In mixed precision accelerate wraps its forward pass for good. A model that is read has no such
    wrapping, and its scores of the examples to check would be others.
    """
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)


def _counted(place: str, data: Data) -> dict[str, Any]:
    """Return what was learned from. Of a URL only its kind: it may hold a password."""
    kind, is_url, _ = place.partition("://")
    return {
        "place": f"{kind}://…" if is_url else place,
        "train": summary([item.example for item in data.train]),
        "validation": summary([item.example for item in data.validation]),
        "bad_rows": data.bad.count,
        "bad_rows_shown": data.bad.lines(),
        "prompts_cut": data.cut,
    }


def _best_step(state: Any) -> int:
    best = state.best_model_checkpoint
    return int(Path(best).name.rpartition("-")[2]) if best else int(state.global_step)


def _reference(order: Order, trainer: RewardTrainer, data: Data, encoder: Encoder) -> tuple[float, float]:
    """Mean and standard deviation of the scores over the reference set, or over the first training rows."""
    if order.reference is None:
        rows = [row for item in data.train for row in item.rows]
    else:
        found = read(order.reference)
        items = encode(found.examples, encoder, found.bad)
        rows = [row for item in items for row in item.rows]
    scores = torch.tensor(reward_model.score_rows(trainer.model, rows[:MAX_REFERENCE]), dtype=torch.float64)
    return float(scores.mean()), max(float(scores.std(correction=0)), LEAST_STD)


def _save(
    order: Order,
    network: Network,
    tokenizer: Tokenizer,
    encoder: Encoder,
    data: Data,
    results: dict[str, Any],
) -> dict[str, Any]:
    """Write model and results; the checkpoints, which hold the optimiser too, are then worth nothing."""
    rows = [item.rows[0] for item in data.train[:CHECKED]]
    network.eval()
    checks = tuple(zip(map(tuple, rows), reward_model.score_rows(network, rows), strict=True))
    card = Card(
        base=order.base,
        max_tokens=encoder.max_tokens,
        mean=results["reward_mean"],
        std=results["reward_std"],
        checks=checks,
        trained={name: results[name] for name in ("scale", "feedback", "settings", "validation")},
    )
    reward_model.save(network, tokenizer, card, order.out)
    results["sha256"] = reward_model.weights_sha256(order.out)
    (order.out / RESULTS).write_text(json.dumps(results, indent=1, default=str) + "\n")
    shutil.rmtree(order.out / CHECKPOINTS, ignore_errors=True)
    return results
