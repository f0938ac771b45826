"""Trains a reward model from feedback, of one score or several heads, by transformers' Trainer.

The weights with the best validation loss are kept. A drain ends a training after the current step. A training
of one score then writes a checkpoint, from which `resume` continues with the same result.
"""

import hashlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, tensor
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
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback import BadRows, Judged, Source, read, split, summary
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.heads import (
    PREFERRED,
    Array,
    Calibration,
    Head,
    HeadsMeasures,
    Measures,
    calibrate,
    measure,
    measure_heads,
    read_opinions,
    reward_weights,
    split_opinions,
)
from penstock.workloads.language.reward.reward_model import (
    CARD,
    HEADS_CARD,
    Card,
    Collate,
    HeadsCard,
    Item,
    Network,
    Numbers,
    Scores,
    build,
    encode,
    output_rows,
    score_rows,
    sides_of,
)
from penstock.workloads.language.settings import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer

log = logging.getLogger(__name__)

RESULTS: Final = "training_results.json"
PLAN: Final = "plan.json"
CHECKPOINTS: Final = "checkpoints"
CHECKED: Final = 4
"""Rows whose scores a saved model records; loading checks them."""
MAX_REFERENCE: Final = 4096
"""Most rows of the reference set that are scored."""
LEAST_STD: Final = 1e-6
RATING_WEIGHT: Final = 4.0
"""Weight of (σ(z) − t)², whose slope is at most a quarter of that of the cross-entropy."""


class RewardTrainer(Trainer):  # type: ignore[misc]  # transformers comes without types
    """transformers' Trainer with the losses of a reward model; without heads it trains one score."""

    control: Any
    loss_is_scaled_for_ga = True
    """`compute_loss` divides by the examples of the whole batch; the Trainer adds the micro-batches."""

    def __init__(
        self,
        network: Network,
        train: list[Item],
        validation: list[Item],
        settings: RewardTraining,
        *,
        heads: Sequence[Head] = (),
        checkpoints: Path,
        device: str | None,
        stop: threading.Event,
    ) -> None:
        """device: "cpu"; other values: a GPU where there is one. stop: ends it after the current step."""
        super().__init__(
            model=network,
            args=_arguments(settings, checkpoints, device, validates=bool(validation)),
            data_collator=Collate(network.config.get_text_config().pad_token_id),
            train_dataset=train,
            eval_dataset=validation or None,
            callbacks=[_Drain(stop), _Progress()],
        )
        self.remove_callback(PrinterCallback)
        if settings.patience and validation:
            self.add_callback(EarlyStoppingCallback(settings.patience))
        self.control: TrainerControl  # made by the Trainer
        self._heads, self._centring, self._validation = heads, settings.centring, validation
        self._stop, self.measures = stop, Measures()

    def fit(self, resume: str | None = None) -> None:
        """Train the network where it is: it keeps the best weights, or the last ones without validation.

        resume: checkpoint to go on from. Raises Interrupted once `stop` is set.
        """
        self.train(resume_from_checkpoint=resume)
        if self._stop.is_set():
            what = "interrupted" if self._heads else "interrupted: go on with --resume"
            log.info(what, extra={"step": self.state.global_step})
            raise Interrupted
        # Mixed precision wraps the forward pass, which would give other scores than the saved model.
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.model.eval()

    def compute_loss(
        self,
        model: Network,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return a micro-batch's part of the mean loss of its batch, which is smaller at an epoch's end."""
        found = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, targets, here = found.logits.float(), inputs["targets"], _examples(inputs)
        if self._heads:
            rated = len(targets)
            pairs = logits[rated:, -1].reshape(2, -1).T
            loss = heads_loss(logits[:rated, :-1], targets, self._heads, pairs, self._centring) * here
        else:
            loss = loss_of(logits[:, 0], targets, self._centring).sum()
        return loss / (here if num_items_in_batch is None else num_items_in_batch)

    def get_batch_samples(self, *arguments: Any) -> tuple[list[dict[str, Tensor]], int]:
        parts, _ = super().get_batch_samples(*arguments)
        return parts, sum(_examples(part) for part in parts)

    def evaluate(self, *_arguments: Any, **_named: Any) -> dict[str, float]:
        """Measure the validation side; the loss is without the centring term, which measures nothing."""
        found: dict[str, Any] = {}
        if self._heads:
            logits, targets, margins = _outputs(self.model, self._validation, len(self._heads))
            pairs = torch.stack([torch.from_numpy(margins), torch.zeros(len(margins))], 1)
            rated = torch.from_numpy(logits), torch.from_numpy(targets)
            found["loss"] = float(heads_loss(*rated, self._heads, pairs, 0.0))
        else:
            given = iter(score_rows(self.model, [row for item in self._validation for row in item.rows]))
            scores = [tuple(next(given) for _ in item.rows) for item in self._validation]
            self.measures = measure([item.example for item in self._validation], scores)
            losses = [_loss_of_one(item, one) for item, one in zip(self._validation, scores, strict=True)]
            found = {"loss": sum(losses) / len(losses), **asdict(self.measures)}
        metrics = {f"eval_{name}": value for name, value in found.items() if value is not None}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _examples(inputs: dict[str, Tensor]) -> int:
    return (len(inputs["input_ids"]) + len(inputs["targets"])) // 2


def loss_of(scores: Tensor, targets: Tensor, centring: float) -> Tensor:
    """Return the loss of each example, [S + P]. scores: of a batch, [S + 2P], as `Collate` orders them."""
    scored = (scores[: len(targets)] - targets) ** 2
    chosen, rejected = scores[len(targets) :].chunk(2) if len(scores) > len(targets) else (scores[:0],) * 2
    return torch.cat([scored, _apart(chosen, rejected, centring)])


def _apart(chosen: Tensor, rejected: Tensor, centring: float) -> Tensor:
    return functional.softplus(rejected - chosen) + centring * (chosen + rejected) ** 2


def _loss_of_one(item: Item, given: Sequence[float]) -> float:
    if isinstance(item.target, float):
        return (given[0] - item.target) ** 2
    return float(np.logaddexp(0.0, given[1] - given[0]))


def heads_loss(
    logits: Tensor, targets: Tensor, heads: Sequence[Head], pairs: Tensor, centring: float
) -> Tensor:
    """Return the loss of a batch: for each head the mean over its ratings, and the mean over pairs.

    logits: [S, K] of S rated responses. targets: 0 to 1, NaN where unrated, [S, K].
    pairs: logits of the head of pairs, (chosen, rejected), [P, 2].
    """
    total = logits.sum() * 0.0  # of a batch without any rating too
    if len(logits):
        is_choice = tensor([one.is_choice for one in heads], device=logits.device)
        given = ~targets.isnan()
        known = torch.where(given, targets, torch.zeros_like(targets))
        choice = functional.binary_cross_entropy_with_logits(logits, known, reduction="none")
        rating = RATING_WEIGHT * (logits.sigmoid() - known) ** 2
        each = torch.where(is_choice, choice, rating) * given
        total = total + (each.sum(0) / given.sum(0).clamp(min=1)).sum()
    return total + _apart(pairs[:, 0], pairs[:, 1], centring).mean() if len(pairs) else total


def judge(
    network: Network, validation: Sequence[Item], heads: Sequence[Head]
) -> tuple[dict[str, Calibration], HeadsMeasures]:
    """Return the calibrations of the heads, and measures of the calibrated heads, on the validation side."""
    logits, targets, margins = _outputs(network, validation, len(heads))
    calibrations = {one.name: calibrate(logits[:, k], targets[:, k]) for k, one in enumerate(heads)}
    shares = np.stack([calibrations[one.name].share(logits[:, k]) for k, one in enumerate(heads)], 1)
    measures = measure_heads([one.name for one in heads], shares, targets, margins)
    return {**calibrations, PREFERRED: Calibration()}, measures


def _outputs(network: Network, items: Sequence[Item], heads: int) -> tuple[Array, Array, Array]:
    """Return the heads' outputs and targets, [S, K], and the margin of each pair, better minus worse, [P]."""
    rated, pairs = sides_of(items)
    rows = [row for item in (*rated, *pairs) for row in item.rows]
    found = np.array(output_rows(network, rows)).reshape(len(rows), heads + 1)
    compared = found[len(rated) :, -1].reshape(-1, 2)
    targets = np.array([item.target for item in rated], np.float64).reshape(len(rated), heads)
    return found[: len(rated), :-1], targets, compared[:, 0] - compared[:, 1]


def _arguments(
    settings: RewardTraining, checkpoints: Path, device: str | None, *, validates: bool
) -> TrainingArguments:
    micro = settings.micro_batch or settings.batch
    on_gpu = device != "cpu" and torch.cuda.is_available()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
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
        logging_steps=0.05,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu,
        seed=settings.seed,
        data_seed=settings.seed,
        **(best if validates else {}),
    )


class _Drain(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Ends the training after the current step, with a checkpoint."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def on_step_end(self, _args: Any, state: Any, control: Any, **_others: Any) -> None:
        if self._stop.is_set() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


class _Progress(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_others: Any) -> None:
        if "train_runtime" in logs:
            return
        what = "validated" if any(name.startswith("eval_") for name in logs) else "training"
        fields = {name.removeprefix("eval_"): value for name, value in logs.items()}
        log.info(what, extra={"step": f"{state.global_step}/{state.max_steps}", **fields})


class StepWatch(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Records when steps end; ends the training after `most` steps, or after `within_s` and `least` steps."""

    def __init__(self, most: int, *, least: int, within_s: float) -> None:
        self._most, self._least, self._within_s = most, least, within_s
        self.at_s: list[float] = []
        self.steps = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        self.steps = state.max_steps

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_others: Any) -> None:
        if not self.at_s:
            self.at_s.append(time.monotonic())

    def on_step_end(self, _args: Any, state: Any, control: Any, **_others: Any) -> None:
        self.at_s.append(time.monotonic())
        is_late = state.global_step >= self._least and self.at_s[-1] - self.at_s[0] >= self._within_s
        if is_late or state.global_step >= self._most:
            control.should_training_stop = True


def fit_heads(
    network: Network,
    train_items: list[Item],
    validation: list[Item],
    heads: Sequence[Head],
    settings: RewardTraining,
    stop: threading.Event | None = None,
    *,
    device: str | None = None,
) -> tuple[Any, dict[str, Calibration], HeadsMeasures]:
    """Train heads where they are; return the Trainer's state, the calibrations and the measures."""
    stop = stop or threading.Event()
    if stop.is_set():
        raise Interrupted
    with TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            network, train_items, validation, settings,
            heads=heads, checkpoints=Path(folder), device=device, stop=stop,
        )  # fmt: skip
        trainer.fit()
    return trainer.state, *judge(network, validation, heads)


def _best_step(state: Any) -> int:
    best = state.best_model_checkpoint
    return int(Path(best).name.rpartition("-")[2]) if best else int(state.global_step)


def checks_of(network: Network, items: Sequence[Item]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the first row of each of the first CHECKED examples with the network's outputs."""
    rows = [item.rows[0] for item in items[:CHECKED]]
    return [(tuple(ids), tuple(one)) for ids, one in zip(rows, output_rows(network, rows), strict=True)]


# ---- A training from feedback to a saved model.


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A training. source: the feedback. base: folder or hub name of the model. out: folder of the result.

    reference: rows for the mean and std of scores; None: the training examples. resume: continue from a
    checkpoint in `out`. heads: of a model of several heads, whose source has neither scale nor key; (): one
    score. weights: of heads in the reward; others have 1, the head of pairs 0.
    """

    source: Source
    base: str
    out: Path
    settings: RewardTraining = field(default_factory=RewardTraining)
    reference: Source | None = None
    resume: bool = False
    device: str | None = None
    heads: tuple[Head, ...] = ()
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """Encoded examples. cut: number of prompts without their beginning. other_key: rows of other keys."""

    train: list[Item]
    validation: list[Item]
    bad: BadRows
    cut: int
    other_key: int


def train(
    order: Order, stop: threading.Event | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """Train a model, save it and return the results; of one score those of `training_results.json`.

    callbacks: of transformers; they may end the training early. Raises ConfigurationError, Interrupted.
    """
    began, stop = time.monotonic(), stop or threading.Event()
    checkpoint = _prepare(order)
    weights = reward_weights(order.heads, order.weights) if order.heads else {}
    tokenizer = load_tokenizer(order.base)
    outputs = len(order.heads) + 1 if order.heads else 1
    network = build(order.base, order.settings, tokenizer.pad_token_id, outputs=outputs)
    known = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    most = order.settings.max_tokens
    encoder = Encoder(tokenizer, min(most, known) if known else most)
    data = read_data(order, encoder)
    if order.heads:
        return _train_heads(order, network, encoder, data, _taught(weights, data.train), stop)
    _same_plan(order, data)
    trainer = RewardTrainer(
        network, data.train, data.validation, order.settings,
        checkpoints=order.out / CHECKPOINTS, device=order.device, stop=stop,
    )  # fmt: skip
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.fit(checkpoint)
    results = _results(order, trainer, data, encoder)
    results["seconds"] = round(time.monotonic() - began, 1)
    return _save(order, network, encoder, data, results)


def read_data(order: Order, encoder: Encoder) -> Data:
    """Read, split and encode feedback; raises ConfigurationError when one side is empty."""
    share, seed = order.settings.validation_share, order.settings.seed
    if order.heads:
        feedback = read_opinions(order.source.place, order.heads, order.source.part)
        sides = split_opinions(feedback.examples, share=share, seed=seed)
    else:
        feedback = read(order.source)
        sides = split(feedback.examples, share=share, seed=seed)
    train_items, validation = (encode(side, encoder, feedback.bad, order.heads) for side in sides)
    for line in feedback.bad.lines():
        log.warning("bad row: %s", line)
    for line in without_difference(train_items, order.heads):
        log.warning(line)
    if not train_items or (share and not validation):
        left = "\n".join([f"feedback={order.source.place}: no row is left", *feedback.bad.lines()])
        raise ConfigurationError(left)
    return Data(train_items, validation, feedback.bad, encoder.cut, feedback.other_key)


def without_difference(items: Sequence[Item], heads: Sequence[Head]) -> list[str]:
    """Return a sentence for each score or head that rates all responses alike, so that nothing is learned."""
    targets = [item.target for item in items if item.target is not None]
    rows = [one if isinstance(one, tuple) else (one,) for one in targets]
    said = []
    for column, name in enumerate([f"head {one.name!r}" for one in heads] or ["the score"]):
        found = {row[column] for row in rows if not math.isnan(row[column])}
        if len(found) == 1 and len(rows) > 1:
            said.append(f"all ratings of {name} are equal: a model learns no difference from them")
    return said


def _prepare(order: Order) -> str | None:
    """Return the checkpoint to resume from; raises ConfigurationError for a folder that does not fit."""
    folder = order.out / CHECKPOINTS
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if any((order.out / card).exists() for card in (CARD, HEADS_CARD)):
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
    digest = hashlib.sha256()
    for item in (*data.train, *data.validation):
        digest.update(json.dumps([item.rows, item.target]).encode())
    plan = {**order.settings.model_dump(mode="json"), "model": order.base, "feedback": digest.hexdigest()}
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
    if data.validation:
        trainer.evaluate()  # of the best weights, which are loaded now
    state = trainer.state
    mean, std = _reference(order, trainer, data, encoder)
    return {
        "model": order.base,
        "scale": order.source.scale.name,
        "feedback": {
            "place": _shown(order.source.place),
            "train": summary([item.example for item in data.train]),
            "validation": summary([item.example for item in data.validation]),
            "bad_rows": data.bad.count,
            "bad_rows_shown": data.bad.lines(),
            "prompts_cut": data.cut,
        },
        "settings": order.settings.model_dump(mode="json"),
        "steps": state.global_step,
        "best_step": _best_step(state),
        "validation": asdict(trainer.measures) if data.validation else None,
        "validation_loss": state.best_metric,
        "reward_mean": mean,
        "reward_std": std,
        "history": state.log_history,
    }


def _shown(place: str) -> str:
    """Return the place of feedback; of a URL only its scheme, because it may hold a password."""
    kind, is_url, _ = place.partition("://")
    return f"{kind}://…" if is_url else place


def _reference(order: Order, trainer: RewardTrainer, data: Data, encoder: Encoder) -> tuple[float, float]:
    """Return mean and standard deviation of the scores of the reference set, or of training rows."""
    items = data.train
    if order.reference is not None:
        found = read(order.reference)
        items = encode(found.examples, encoder, found.bad)
    rows = [row for item in items for row in item.rows]
    scores = torch.tensor(score_rows(trainer.model, rows[:MAX_REFERENCE]), dtype=torch.float64)
    return float(scores.mean()), max(float(scores.std(correction=0)), LEAST_STD)


def _save(
    order: Order, network: Network, encoder: Encoder, data: Data, results: dict[str, Any]
) -> dict[str, Any]:
    """Write model and results, and remove the checkpoints."""
    card = Card(
        base=order.base,
        max_tokens=encoder.max_tokens,
        mean=results["reward_mean"],
        std=results["reward_std"],
        checks=tuple(Scores(ids=ids, score=given[0]) for ids, given in checks_of(network, data.train)),
        trained={name: results[name] for name in ("scale", "feedback", "settings", "validation")},
    )
    reward_model.save(network, encoder.tokenizer, card, order.out)
    results["sha256"] = reward_model.weights_sha256(order.out)
    (order.out / RESULTS).write_text(json.dumps(results, indent=1, default=str) + "\n")
    shutil.rmtree(order.out / CHECKPOINTS, ignore_errors=True)
    return results


def _taught(weights: Mapping[str, float], items: Sequence[Item]) -> dict[str, float]:
    """Return the weights, 0 for heads without a training row, whose outputs are random."""
    taught = {
        name
        for item in items
        for name in (item.example.shares if isinstance(item.example, Judged) else (PREFERRED,))
    }
    found = {name: one if name in taught else 0.0 for name, one in weights.items()}
    untaught = [name for name, one in weights.items() if one and not found[name]]
    if not any(found.values()):
        raise ConfigurationError(
            f"weight {untaught[0]}={weights[untaught[0]]:g}: no row that is trained on rates it, nor another "
            f"head of a weight above 0; give one that was rated a weight: {', '.join(sorted(taught))}"
        )
    if untaught:
        log.warning("heads without a training row have weight 0 in the reward", extra={"heads": untaught})
    return found


def _train_heads(
    order: Order,
    network: Network,
    encoder: Encoder,
    data: Data,
    weights: dict[str, float],
    stop: threading.Event,
) -> dict[str, Any]:
    state, calibrations, measures = fit_heads(
        network, data.train, data.validation, order.heads, order.settings, stop, device=order.device
    )
    losses = [one for one in state.log_history if "eval_loss" in one]
    history = [{"step": one["step"], "validation_loss": one["eval_loss"]} for one in losses]
    best = [number for number, one in enumerate(history, 1) if one["step"] == _best_step(state)]
    trained: dict[str, Any] = {
        "feedback": _shown(order.source.place),
        "settings": order.settings.model_dump(mode="json"),
    }
    for side, items in (("train", data.train), ("validation", data.validation)):
        trained[side] = dict(zip(("responses", "pairs"), map(len, sides_of(items)), strict=True))
    trained |= {
        "bad_rows": data.bad.count,
        "bad_rows_shown": data.bad.lines(),
        "best_epoch": best[0] if best else math.ceil(state.epoch),
        "measures": asdict(measures),
    }
    card = HeadsCard(
        base=order.base,
        max_tokens=encoder.max_tokens,
        heads=tuple(f"{one.name}={one.scale.name}" for one in order.heads),
        calibrations=calibrations,
        weights=weights,
        checks=tuple(Numbers(ids=ids, given=given) for ids, given in checks_of(network, data.train)),
        trained=trained,
    )
    reward_model.save(network, encoder.tokenizer, card, order.out)
    return {**trained, "other_key": data.other_key, "history": history}
