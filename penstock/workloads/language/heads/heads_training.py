"""Trains a network of several heads: all that was said of a response is learned in one pass.

    opinions ─► split by prompt ─► token ids ─► AdamW on `heads_loss` ─► best epoch ─► calibration

After each epoch the validation opinions are scored; the weights with the least validation loss are kept.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import get_scheduler

from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback.examples import BadRows, Preference
from penstock.workloads.language.heads.calibration import Calibration, calibrate
from penstock.workloads.language.heads.head import PREFERRED, Head
from penstock.workloads.language.heads.heads_loss import heads_loss
from penstock.workloads.language.heads.heads_measures import HeadsMeasures, measure_heads
from penstock.workloads.language.heads.judged_rows import Judged, Opinion
from penstock.workloads.language.reward.reward_model import Network, output_rows
from penstock.workloads.language.reward.training_section import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, pad

log = logging.getLogger(__name__)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Opinions as token ids.

    rows: of S rated responses. targets: 0 to 1 or NaN, [S, K]. pairs: of P pairs, (chosen, rejected).
    """

    rows: list[list[int]]
    targets: Array
    pairs: list[tuple[list[int], list[int]]]

    def __len__(self) -> int:
        return len(self.rows) + len(self.pairs)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a training came to. history: a line of measures for each epoch. best_epoch: counted from 1."""

    calibrations: dict[str, Calibration]
    measures: HeadsMeasures
    history: list[dict[str, Any]]
    best_epoch: int


def encode_opinions(
    opinions: Sequence[Opinion], heads: Sequence[Head], encoder: Encoder, bad: BadRows
) -> Encoded:
    """Return the opinions that a model can read; the others are counted in `bad`."""
    found = Encoded([], np.zeros((0, len(heads))), [])
    targets: list[list[float]] = []
    for one in opinions:
        try:
            prompt = encoder.prompt_ids(one.prompt)
            if isinstance(one, Preference):
                both = (encoder.response_ids(text) for text in (one.chosen, one.rejected))
                chosen, rejected = (encoder.join(prompt, ids) for ids in both)
                found.pairs.append((chosen, rejected))
            else:
                found.rows.append(encoder.join(prompt, encoder.response_ids(one.response)))
                targets.append(_targets(one, heads))
        except ValueError as error:
            bad.add(one.where, str(error))
    return Encoded(found.rows, np.array(targets).reshape(len(targets), len(heads)), found.pairs)


def fit(
    network: Network,
    train: Encoded,
    validation: Encoded,
    heads: Sequence[Head],
    settings: RewardTraining,
    stop: threading.Event | None = None,
) -> Fitted:
    """Train a network where it is, and calibrate it; without a validation side the last weights are kept.

    Raises Interrupted once `stop` is set; the network is then of no use.
    """
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    per_epoch = -(-len(train) // settings.batch)
    steps = max(1, round(settings.epochs * per_epoch))
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = get_scheduler(
        settings.schedule, optimiser,
        num_warmup_steps=round(settings.warmup * steps), num_training_steps=steps,
    )  # fmt: skip
    order, history = _orders(len(train), settings), list[dict[str, Any]]()
    best, kept, best_epoch, done = np.inf, [weight.detach().clone() for weight in trained], 0, 0
    while done < steps:
        network.train()
        for _ in range(min(per_epoch, steps - done)):
            if stop is not None and stop.is_set():
                raise Interrupted
            optimiser.zero_grad()
            _backward(network, train, next(order), heads, settings)
            torch.nn.utils.clip_grad_norm_(trained, settings.max_gradient_norm)
            optimiser.step()
            schedule.step()
            done += 1
        loss = _loss(network, validation, heads) if len(validation) else -float(len(history) + 1)
        history.append({"step": done, "validation_loss": loss if len(validation) else None})
        log.info(
            "trained", extra={"step": f"{done}/{steps}", "validation_loss": history[-1]["validation_loss"]}
        )
        if loss < best:
            best, best_epoch = loss, len(history)
            kept = [weight.detach().clone() for weight in trained]
        elif settings.patience and len(history) - best_epoch >= settings.patience:
            break
    with torch.no_grad():
        for weight, value in zip(trained, kept, strict=True):
            weight.copy_(value)
    network.eval()
    calibrations, measures = judge(network, validation, heads)
    return Fitted(calibrations, measures, history, best_epoch)


def judge(
    network: Network, validation: Encoded, heads: Sequence[Head]
) -> tuple[dict[str, Calibration], HeadsMeasures]:
    """Return what calibrates the heads, and measures of the calibrated heads, by what was not trained on."""
    logits, margins = _outputs(network, validation, len(heads))
    calibrations = {
        one.name: calibrate(logits[:, k], validation.targets[:, k]) for k, one in enumerate(heads)
    }
    shares = np.stack([calibrations[one.name].share(logits[:, k]) for k, one in enumerate(heads)], 1)
    measures = measure_heads([one.name for one in heads], shares, validation.targets, margins)
    return {**calibrations, PREFERRED: Calibration()}, measures


def _targets(one: Judged, heads: Sequence[Head]) -> list[float]:
    return [one.shares.get(head.name, float("nan")) for head in heads]


def _orders(count: int, settings: RewardTraining) -> Iterator[list[int]]:
    """Yield the numbers of each batch; every epoch has an order of its own, decided by the seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        for start in range(0, count, settings.batch):
            yield order[start : start + settings.batch]


def _backward(
    network: Network, data: Encoded, chosen: Sequence[int], heads: Sequence[Head], settings: RewardTraining
) -> None:
    """Add up the gradient of a batch, in parts of `micro_batch`."""
    size = settings.micro_batch or settings.batch
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        scored = [index for index in part if index < len(data.rows)]
        pairs = [data.pairs[index - len(data.rows)] for index in part if index >= len(data.rows)]
        rows = [data.rows[index] for index in scored] + [one for one, _ in pairs] + [one for _, one in pairs]
        ids, mask = pad(rows, network.config.get_text_config().pad_token_id)
        logits = network(
            input_ids=ids.to(network.device), attention_mask=mask.to(network.device)
        ).logits.float()
        compared = torch.stack(logits[len(scored) :, -1].chunk(2), 1) if pairs else logits[:0, :2]
        targets = torch.from_numpy(data.targets[scored]).to(logits)
        loss = heads_loss(
            logits[: len(scored), :-1], targets, _choices(heads, logits), compared, settings.centring
        )
        (loss * len(part) / len(chosen)).backward()


def _choices(heads: Sequence[Head], like: Tensor) -> Tensor:
    return torch.tensor([one.is_choice for one in heads], device=like.device)


def _outputs(network: Network, data: Encoded, heads: int) -> tuple[Array, Array]:
    """Return the heads' numbers, [S, K], and of each pair the better minus the worse, [P]."""
    rows = [*data.rows, *(row for pair in data.pairs for row in pair)]
    found = np.array(output_rows(network, rows)).reshape(len(rows), heads + 1)
    compared = found[len(data.rows) :, -1].reshape(-1, 2)
    return found[: len(data.rows), :-1], compared[:, 0] - compared[:, 1]


def _loss(network: Network, data: Encoded, heads: Sequence[Head]) -> float:
    """Return the loss without the centring, which says nothing of how good a model is."""
    logits, margins = _outputs(network, data, len(heads))
    given = torch.from_numpy(logits)
    pairs = torch.stack([torch.from_numpy(margins), torch.zeros(len(margins))], 1)
    return float(heads_loss(given, torch.from_numpy(data.targets), _choices(heads, given), pairs, 0.0))
