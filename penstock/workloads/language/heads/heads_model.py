"""A network of several heads in a folder: what people will say of a response, each thing as 0 to 1.

    DIR/adapter_model.safetensors, config.json, tokenizer…    as those of every reward model
    DIR/heads.json                                            heads, calibration, weights, scores to check

Its reward is the weighted mean of the heads' shares, moved to −1 … 1.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import get_scheduler

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback.examples import BadRows, Preference
from penstock.workloads.language.heads.head import (
    PREFERRED,
    Calibration,
    Head,
    Judged,
    Opinion,
    calibrate,
    parse_heads,
    read_opinions,
    reward_weights,
    split,
    to_opinions,
)
from penstock.workloads.language.heads.heads_measures import HeadsMeasures, measure_heads
from penstock.workloads.language.prompt import Prompt
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.reward_model import CHECKED, TOLERANCE, Network, output_rows
from penstock.workloads.language.reward.reward_source import BadReward, Rewards, Sample, ScoredBy, checked
from penstock.workloads.language.reward.training_section import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer, pad

# ---- The loss of a network of several heads, where most people rate some things only.

RATING_WEIGHT: Final = 4.0
"""The slope of (σ(z) − t)² is at most a quarter of the cross-entropy's: this makes them comparable."""


def heads_loss(logits: Tensor, targets: Tensor, is_choice: Tensor, pairs: Tensor, centring: float) -> Tensor:
    """Return the loss of a batch.

    logits: [S, K] of S rated responses. targets: 0 to 1, NaN where unrated, [S, K]. is_choice: bool [K].
    pairs: logits of the comparing head, (chosen, rejected), [P, 2].
    """
    total = logits.sum() * 0.0  # of a batch without any rating too
    if len(logits):
        given = ~targets.isnan()
        known = torch.where(given, targets, torch.zeros_like(targets))
        choice = functional.binary_cross_entropy_with_logits(logits, known, reduction="none")
        rating = RATING_WEIGHT * (logits.sigmoid() - known) ** 2
        each = torch.where(is_choice, choice, rating) * given
        total = total + (each.sum(0) / given.sum(0).clamp(min=1)).sum()
    if len(pairs):
        chosen, rejected = pairs.unbind(1)
        apart = functional.softplus(rejected - chosen) + centring * (chosen + rejected) ** 2
        total = total + apart.mean()
    return total


# ---- Trains a network of several heads: all that was said of a response is learned in one pass.

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


CARD: Final = "heads.json"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a model says of a response. shares: 0 to 1, by head, that of pairs too. reward: 0 to 1."""

    shares: dict[str, float]
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsCard:
    """What `heads.json` says. weights: of each head in the reward. checks: rows with the heads' numbers."""

    base: str
    max_tokens: int
    heads: tuple[Head, ...]
    calibrations: dict[str, Calibration]
    weights: dict[str, float]
    checks: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
    trained: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOrder:
    """What to train from what, and where to.

    weights: of heads in the reward; others have 1, that of pairs 0.
    """

    place: str
    heads: tuple[Head, ...]
    base: str
    out: Path
    settings: RewardTraining = field(default_factory=RewardTraining)
    part: str | None = None
    weights: Mapping[str, float] | None = None
    device: str = "cpu"


class HeadsModel:
    """A network with its heads. One thread at a time."""

    def __init__(self, network: Network, encoder: Encoder, card: HeadsCard, by: ScoredBy) -> None:
        self.network, self.encoder, self.card, self.by = network, encoder, card, by
        self.vocabulary = network.get_input_embeddings().num_embeddings

    @classmethod
    def load(cls, folder: Path, *, base: str | None = None, device: str = "cpu") -> "HeadsModel":
        """Read a folder that `save` wrote. base: where the base model lies now, where it has moved.

        Raises ConfigurationError for a folder that holds none, or gives other numbers than in training.
        """
        card = _read_card(folder)
        network = reward_model.load_network(folder, base, is_trainable=True).to(torch.device(device))
        network.eval()
        rows = [ids for ids, _ in card.checks]
        found = np.array(reward_model.output_rows(network, rows))
        if not np.allclose(found, [given for _, given in card.checks], rtol=TOLERANCE, atol=TOLERANCE):
            raise ConfigurationError(
                f"{folder}: gives other numbers than when it was trained: is its base model ({card.base}) "
                "another one now? Say where the right one is with --base"
            )
        digest = hashlib.sha256(reward_model.weights_sha256(folder).encode())
        digest.update((folder / CARD).read_bytes())
        by = ScoredBy(name=folder.resolve().name, sha256=digest.hexdigest())
        return cls(network, Encoder(load_tokenizer(str(folder)), card.max_tokens), card, by)

    def encode(self, sample: Sample) -> list[int]:
        """Return the row of token ids that is scored; raises BadSample."""
        return reward_model.encode_sample(sample, self.encoder, self.vocabulary)

    def judge(self, samples: Sequence[Sample]) -> list[Judgement]:
        """Return what people will say of each response; raises BadSample, BadReward."""
        return self.judge_rows([self.encode(sample) for sample in samples])

    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        """Return the rewards, −1 to 1, of rows that `encode` made; raises BadReward for one not finite."""
        rewards = [2 * one.reward - 1 for one in self.judge_rows(rows)]
        return checked(rewards, len(rows), self.by.name)

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return rewards, −1 to 1, as every source does; raises BadSample, BadReward."""
        return Rewards(self.score_rows([self.encode(sample) for sample in samples]), self.by)

    def score_response(
        self, user_msg: Prompt, response: str, feedback: Mapping[str, Any] | None = None
    ) -> float:
        """Return the reward of a response to a message, 0 to 1.

        feedback: what somebody said of this very response, by head, each on its own scale; it counts instead
        of what the model expects. Raises BadSample, and ValueError for feedback that names no head or is not
        on its scale.
        """
        [found] = self.judge([Sample(prompt=user_msg, response=response)])
        said = {name: self._head(name).share(raw) for name, raw in (feedback or {}).items()}
        return self._reward({**found.shares, **said})

    def update_from_feedback(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        settings: RewardTraining | None = None,
        stop: threading.Event | None = None,
    ) -> HeadsMeasures:
        """Go on learning from rows of feedback, where the model stands; returns measures of those held out.

        rows: new ones together with earlier ones that it is to remember; what is left out is forgotten.
        Raises ValueError where no row can be used, Interrupted once `stop` is set.
        """
        chosen = settings or RewardTraining.model_validate(self.card.trained["settings"])
        found = to_opinions(((f"row {number}", row) for number, row in enumerate(rows, 1)), self.card.heads)
        sides = split(found.given, share=chosen.validation_share, seed=chosen.seed)
        train, validation = (
            encode_opinions(side, self.card.heads, self.encoder, found.bad) for side in sides
        )
        if not len(train):
            lines = "; ".join(found.bad.lines()) or "none rates what a head is for"
            raise ValueError(f"{len(rows)} rows of feedback: no row can be used: {lines}")
        fitted = fit(self.network, train, validation, self.card.heads, chosen, stop)
        checks = _checks(self.network, train)
        trained = {**self.card.trained, "settings": chosen.model_dump(mode="json")}
        self.card = replace(self.card, calibrations=fitted.calibrations, checks=checks, trained=trained)
        self.by = replace(self.by, sha256="")
        return fitted.measures

    def measured(self, place: str, part: str | None = None) -> HeadsMeasures:
        """Return the measures over all feedback of a place; raises ConfigurationError."""
        found = read_opinions(place, self.card.heads, part)
        data = encode_opinions(found.given, self.card.heads, self.encoder, found.bad)
        return judge(self.network, data, self.card.heads)[1]

    def save(self, folder: Path) -> None:
        """Write the model; `heads.json` last, so that a folder with one is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        self.network.save_pretrained(folder, safe_serialization=True)
        self.network.config.save_pretrained(folder)
        self.encoder.tokenizer.save_pretrained(folder)
        card = self.card
        text = {
            "base": card.base,
            "max_tokens": card.max_tokens,
            "heads": [f"{one.name}={one.scale.name}" for one in card.heads],
            "calibrations": {name: [one.slope, one.shift] for name, one in card.calibrations.items()},
            "weights": card.weights,
            "checks": [{"ids": list(ids), "given": list(given)} for ids, given in card.checks],
            "trained": card.trained,
        }
        (folder / CARD).write_text(json.dumps(text, indent=1) + "\n")

    def close(self) -> None:
        """Do nothing: nothing is held open."""

    def judge_rows(self, rows: Sequence[Sequence[int]]) -> list[Judgement]:
        """Return what people will say of rows that `encode` made; raises BadReward for one not finite."""
        names = [*(one.name for one in self.card.heads), PREFERRED]
        given = np.array(reward_model.output_rows(self.network, rows)).reshape(len(rows), len(names))
        if not np.isfinite(given).all():
            raise BadReward(f"{self.by.name}: gives numbers that are not finite")
        shares = np.stack(
            [self.card.calibrations[name].share(given[:, k]) for k, name in enumerate(names)], 1
        )
        return [
            Judgement(said, self._reward(said))
            for said in (dict(zip(names, one, strict=True)) for one in shares.tolist())
        ]

    def _reward(self, shares: Mapping[str, float]) -> float:
        weights = self.card.weights
        return sum(weights[name] * shares[name] for name in weights) / sum(weights.values())

    def _head(self, name: str) -> Head:
        for one in self.card.heads:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.card.heads)
        raise ValueError(f"feedback[{name!r}]: there is no such head; this model has {names}")


def train_heads(order: HeadsOrder, stop: threading.Event | None = None) -> dict[str, Any]:
    """Train a model from feedback and write it; returns what was learned from what, with the measures.

    Raises ConfigurationError for feedback, a model, weights or a folder that cannot be used, Interrupted once
    `stop` is set; nothing is written then.
    """
    if (order.out / CARD).exists():
        raise ConfigurationError(f"--out {order.out}: holds a trained model already: choose another folder")
    weights = reward_weights(order.heads, order.weights)
    tokenizer = load_tokenizer(order.base)
    network = reward_model.build(
        order.base, order.settings, tokenizer.pad_token_id, outputs=len(order.heads) + 1
    ).to(torch.device(order.device))
    encoder = Encoder(tokenizer, reward_model.max_tokens_of(network, order.settings.max_tokens))
    found = read_opinions(order.place, order.heads, order.part)
    sides = split(found.given, share=order.settings.validation_share, seed=order.settings.seed)
    train, validation = (encode_opinions(side, order.heads, encoder, found.bad) for side in sides)
    if not len(train) or (order.settings.validation_share and not len(validation)):
        lines = "\n".join([f"feedback={order.place}: no row is left", *found.bad.lines()])
        raise ConfigurationError(lines)
    weights = _learned(weights, order.heads, train)
    fitted = fit(network, train, validation, order.heads, order.settings, stop)
    trained = _trained(order, train, validation, found.bad, fitted)
    card = HeadsCard(
        base=order.base,
        max_tokens=encoder.max_tokens,
        heads=order.heads,
        calibrations=fitted.calibrations,
        weights=weights,
        checks=_checks(network, train),
        trained=trained,
    )
    HeadsModel(network, encoder, card, ScoredBy(name=order.out.name)).save(order.out)
    return {**trained, "other_key": found.other_key, "history": fitted.history}


def _learned(weights: Mapping[str, float], heads: Sequence[Head], train: Encoded) -> dict[str, float]:
    """Return the weights without those of heads that nothing teaches, which say what chance made of them.

    Raises ConfigurationError where none is left.
    """
    taught = {one.name for k, one in enumerate(heads) if not np.isnan(train.targets[:, k]).all()}
    if train.pairs:
        taught.add(PREFERRED)
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


def _trained(
    order: HeadsOrder, train: Encoded, validation: Encoded, bad: BadRows, fitted: Fitted
) -> dict[str, Any]:
    kind, is_url, _ = order.place.partition("://")
    counted = {
        side: {"responses": len(data.rows), "pairs": len(data.pairs)}
        for side, data in (("train", train), ("validation", validation))
    }
    return {
        "feedback": f"{kind}://…" if is_url else order.place,
        "settings": order.settings.model_dump(mode="json"),
        **counted,
        "bad_rows": bad.count,
        "bad_rows_shown": bad.lines(),
        "best_epoch": fitted.best_epoch,
        "measures": fitted.measures.as_dict(),
    }


def _checks(network: Network, data: Encoded) -> tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]:
    rows = [*data.rows, *(row for pair in data.pairs for row in pair)][:CHECKED]
    given = reward_model.output_rows(network, rows)
    return tuple((tuple(ids), tuple(one)) for ids, one in zip(rows, given, strict=True))


def _read_card(folder: Path) -> HeadsCard:
    try:
        text = json.loads((folder / CARD).read_text())
        return HeadsCard(
            base=text["base"],
            max_tokens=int(text["max_tokens"]),
            heads=parse_heads(text["heads"]),
            calibrations={name: Calibration(*map(float, one)) for name, one in text["calibrations"].items()},
            weights={name: float(weight) for name, weight in text["weights"].items()},
            checks=tuple((tuple(one["ids"]), tuple(one["given"])) for one in text["checks"]),
            trained=text["trained"],
        )
    except FileNotFoundError as error:
        raise ConfigurationError(f"{folder}: holds no {CARD}: name a folder of a model with heads") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{folder / CARD}: cannot be read: {error}") from error
