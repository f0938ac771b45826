"""Trains a reward model from feedback, of one score or several heads, by transformers' Trainer.

The weights with the best validation loss are kept. A drain ends a training behind the step under way; that of
one score has written a checkpoint by then, from which `resume` goes on as if nothing had been.
"""

import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback import Judged, Source, read, split, summary
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.fitting import (
    Fitted,
    RewardTrainer,
    best_step,
    checks_of,
    fit,
    in_full_precision,
)
from penstock.workloads.language.reward.heads import (
    PREFERRED,
    Head,
    read_opinions,
    reward_weights,
    split_opinions,
)
from penstock.workloads.language.reward.network import (
    Data,
    Item,
    Network,
    build,
    encode,
    max_tokens_of,
    score_rows,
    sides_of,
)
from penstock.workloads.language.reward.reward_model import CARD, HEADS_CARD, Card, HeadsCard, HeadsModel
from penstock.workloads.language.reward.reward_source import ScoredBy
from penstock.workloads.language.settings import RewardTraining
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

    reference: rows to take mean and std over; None: the training examples. heads: of a model of several,
    whose source has neither scale nor key. weights: of heads in the reward; others have 1, that of pairs 0.
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


def train(
    order: Order, stop: threading.Event | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """Train, save and return the results: of one score, what `training_results.json` holds.

    callbacks: called at each step as transformers does; they may end the training early.
    """
    began = time.monotonic()
    checkpoint = _prepare(order)
    weights = reward_weights(order.heads, order.weights) if order.heads else {}
    tokenizer = load_tokenizer(order.base)
    outputs = len(order.heads) + 1 if order.heads else 1
    network = build(order.base, order.settings, tokenizer.pad_token_id, outputs=outputs)
    encoder = Encoder(tokenizer, max_tokens_of(network, order.settings.max_tokens))
    data = read_data(order, encoder)
    if order.heads:
        weights = _taught(weights, data.train)
        fitted = fit(
            network, data.train, data.validation, order.heads, order.settings, stop, device=order.device
        )
        return _save_heads(order, network, encoder, data, weights, fitted)
    _same_plan(order, data)
    stop = stop or threading.Event()
    trainer = RewardTrainer(
        network, data.train, data.validation, order.settings,
        checkpoints=order.out / CHECKPOINTS, device=order.device, stop=stop,
    )  # fmt: skip
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.is_set():
        log.info("interrupted: go on with --resume", extra={"step": trainer.state.global_step})
        raise Interrupted
    results = _results(order, trainer, data, encoder)
    results["seconds"] = round(time.monotonic() - began, 1)
    return _save(order, trainer.model, tokenizer, encoder, data, results)


def read_data(order: Order, encoder: Encoder) -> Data:
    """Read, split and encode; raises ConfigurationError when nothing is left of one side."""
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
    if not train_items or (share and not validation):
        left = "\n".join([f"feedback={order.source.place}: no row is left", *feedback.bad.lines()])
        raise ConfigurationError(left)
    return Data(train_items, validation, feedback.bad, encoder.cut, feedback.other_key)


def _prepare(order: Order) -> str | None:
    """The checkpoint to go on from; raises ConfigurationError for a folder that does not fit."""
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
    """Write what this training was made from."""
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
    in_full_precision(trainer)
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
        "best_step": best_step(state),
        "validation": asdict(trainer.measures) if data.validation else None,
        "validation_loss": state.best_metric,
        "reward_mean": mean,
        "reward_std": std,
        "history": state.log_history,
    }


def _shown(place: str) -> str:
    """Return the place of feedback; of a URL only its kind: it may hold a password."""
    kind, is_url, _ = place.partition("://")
    return f"{kind}://…" if is_url else place


def _reference(order: Order, trainer: RewardTrainer, data: Data, encoder: Encoder) -> tuple[float, float]:
    """Mean and standard deviation of the scores over the reference set, or over the first training rows."""
    if order.reference is None:
        rows = [row for item in data.train for row in item.rows]
    else:
        found = read(order.reference)
        items = encode(found.examples, encoder, found.bad)
        rows = [row for item in items for row in item.rows]
    scores = torch.tensor(score_rows(trainer.model, rows[:MAX_REFERENCE]), dtype=torch.float64)
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
    network.eval()
    card = Card(
        base=order.base,
        max_tokens=encoder.max_tokens,
        mean=results["reward_mean"],
        std=results["reward_std"],
        checks=tuple((ids, given[0]) for ids, given in checks_of(network, data.train)),
        trained={name: results[name] for name in ("scale", "feedback", "settings", "validation")},
    )
    reward_model.save(network, tokenizer, card, order.out)
    results["sha256"] = reward_model.weights_sha256(order.out)
    (order.out / RESULTS).write_text(json.dumps(results, indent=1, default=str) + "\n")
    shutil.rmtree(order.out / CHECKPOINTS, ignore_errors=True)
    return results


def _taught(weights: Mapping[str, float], items: Sequence[Item]) -> dict[str, float]:
    """Return the weights without those of heads that nothing teaches, which say what chance made of them."""
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
        log.warning("heads that no row teaches count nothing in the reward", extra={"heads": untaught})
    return found


def _save_heads(
    order: Order, network: Network, encoder: Encoder, data: Data, weights: Mapping[str, float], fitted: Fitted
) -> dict[str, Any]:
    counted = {
        side: dict(zip(("responses", "pairs"), map(len, sides_of(items)), strict=True))
        for side, items in (("train", data.train), ("validation", data.validation))
    }
    trained = {
        "feedback": _shown(order.source.place),
        "settings": order.settings.model_dump(mode="json"),
        **counted,
        "bad_rows": data.bad.count,
        "bad_rows_shown": data.bad.lines(),
        "best_epoch": fitted.best_epoch,
        "measures": asdict(fitted.measures),
    }
    card = HeadsCard(
        base=order.base,
        max_tokens=encoder.max_tokens,
        heads=order.heads,
        calibrations=fitted.calibrations,
        weights=dict(weights),
        checks=checks_of(network, data.train),
        trained=trained,
    )
    HeadsModel(network, encoder, card, ScoredBy(name=order.out.name)).save(order.out)
    return {**trained, "other_key": data.other_key, "history": fitted.history}
