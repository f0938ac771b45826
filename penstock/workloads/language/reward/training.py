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
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import summary
from penstock.workloads.language.feedback.reading import Source, read
from penstock.workloads.language.feedback.split import split
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.dataset import Data, encode
from penstock.workloads.language.reward.reward_model import CARD, CHECKED, Card, Network
from penstock.workloads.language.reward.trainer import RewardTrainer
from penstock.workloads.language.reward.training_section import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

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
