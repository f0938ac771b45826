"""A reward model: a transformer with one score, or several heads, in Hugging Face format.

    DIR/adapter_model.safetensors, adapter_config.json    adapter and head; without LoRA model.safetensors
    DIR/config.json, tokenizer…                           one number: `reward` has mean, std, …
    DIR/reward.json, or heads.json                        what was learned from what, and scores to check

docs/rlhf.md reads one by transformers and peft alone. Nothing of it is pickled and no code of a model's
repository is run.
"""

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch
from peft import PeftConfig, PeftModel
from transformers import AutoConfig

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.loading import check_adapter
from penstock.workloads.language.prompt import Prompt
from penstock.workloads.language.reward.heads import (
    PREFERRED,
    Calibration,
    Head,
    HeadsMeasures,
    parse_heads,
    read_opinions,
    split_opinions,
    to_opinions,
)
from penstock.workloads.language.reward.network import Network, classifier, encode, output_rows, score_rows
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    BadSample,
    Rewards,
    Sample,
    ScoredBy,
    checked,
)
from penstock.workloads.language.settings import RewardTraining, told_as
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer

CARD: Final = "reward.json"
HEADS_CARD: Final = "heads.json"
TOLERANCE: Final = 1e-3
"""How far the scores of the examples to check may differ on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What `reward.json` says beside the weights. checks: rows of token ids with their scores."""

    base: str
    max_tokens: int
    mean: float
    std: float
    checks: tuple[tuple[tuple[int, ...], float], ...]
    trained: dict[str, Any]


def save(network: Network, tokenizer: Any, card: Card, folder: Path) -> None:
    """Write a model; `reward.json` last, so that a folder with one is whole."""
    network.config.reward = {"mean": card.mean, "std": card.std, "max_tokens": card.max_tokens}
    checks = [{"ids": list(ids), "score": score} for ids, score in card.checks]
    _write(network, tokenizer, folder, CARD, {**asdict(card), "checks": checks})


def _write(network: Network, tokenizer: Any, folder: Path, name: str, text: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder, safe_serialization=True)
    network.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / name).write_text(json.dumps(text, indent=1) + "\n")


class SavedModel(ABC):
    """A model that was saved; scores what it is shown. One thread at a time."""

    def __init__(self, network: Network, encoder: Encoder, by: ScoredBy) -> None:
        self.network, self.encoder, self.by = network, encoder, by
        self.vocabulary = network.get_input_embeddings().num_embeddings

    def encode(self, sample: Sample) -> list[int]:
        """Return the row of token ids that is scored; raises BadSample.

        That is for a response that does not fit, or ids that are of another tokenizer.
        """
        try:
            if not sample.response_ids:
                return self.encoder.encode(sample.prompt, sample.response, cut_short=sample.cut_short)
            ids = self.encoder.join(sample.prompt_ids, sample.response_ids)
        except ValueError as error:
            raise BadSample(str(error)) from error
        highest = max(ids)
        if highest >= self.vocabulary or min(ids) < 0:
            raise BadSample(
                f"token id {highest} of a vocabulary of {self.vocabulary}: use this model's tokenizer"
            )
        return ids

    @abstractmethod
    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        """Return scores of rows that `encode` made; raises BadReward for one that is not finite."""

    def score(self, samples: Sequence[Sample]) -> Rewards:
        return Rewards(self.score_rows([self.encode(sample) for sample in samples]), self.by)

    def close(self) -> None:  # noqa: B027 - of a source of rewards; here nothing is held open
        """Do nothing."""


class RewardModel(SavedModel):
    """A model of one score."""

    @classmethod
    def load(cls, folder: Path, *, base: str | None = None, device: str = "cpu") -> Self:
        """Read a folder that `save` wrote. base: where the base model lies now, where it has moved.

        Raises ConfigurationError for a folder that holds none, and for scores that are not those of training:
        another base model, or a head that is not the one that was trained.
        """
        card = _read_card(folder, CARD, _card)
        network = load_network(folder, base).to(torch.device(device)).eval()
        found = score_rows(network, [ids for ids, _ in card.checks])
        for (_, expected), score in zip(card.checks, found, strict=True):
            if abs(score - expected) > TOLERANCE * max(1.0, abs(expected)):
                raise ConfigurationError(
                    f"{folder}: gives {score:.4f} where it gave {expected:.4f} when it was trained: is its "
                    f"base model ({card.base}) another one now? Say where the right one is with --base"
                )
        by = ScoredBy(name=folder.resolve().name, sha256=weights_sha256(folder), mean=card.mean, std=card.std)
        return cls(network, Encoder(load_tokenizer(str(folder)), card.max_tokens), by)

    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        return checked(score_rows(self.network, rows), len(rows), self.by.name)


def weights_sha256(folder: Path) -> str:
    """Return a digest of the weights in a folder and of what they were made for."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]):
        if path.exists():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def load_network(folder: Path, base: str | None, *, is_trainable: bool = False) -> Network:
    """Return the network of a folder, with its adapter on the base model where it has one.

    base: where the base model lies now, where it has moved. is_trainable: whether its adapter may learn on.
    Raises ConfigurationError.
    """
    if not (folder / "adapter_config.json").exists():
        return classifier(str(folder))
    check_adapter(folder)
    place = base or PeftConfig.from_pretrained(folder).base_model_name_or_path
    with told_as(f"{folder}: its settings cannot be read", OSError, ValueError):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        network = classifier(place, config=config)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{folder}: the base model of its adapter: {error}; say where it is with --base"
        ) from error
    return PeftModel.from_pretrained(network, folder, is_trainable=is_trainable)


C = TypeVar("C")


def _read_card(folder: Path, name: str, read: Callable[[Mapping[str, Any]], C]) -> C:
    try:
        return read(json.loads((folder / name).read_text()))
    except FileNotFoundError as error:
        wanted = "that `penstock rlhf reward train` wrote" if name == CARD else "of a model with heads"
        raise ConfigurationError(f"{folder}: holds no {name}: name a folder {wanted}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{folder / name}: cannot be read: {error}") from error


def _card(text: Mapping[str, Any]) -> Card:
    return Card(
        base=text["base"],
        max_tokens=int(text["max_tokens"]),
        mean=float(text["mean"]),
        std=float(text["std"]),
        checks=tuple((tuple(map(int, one["ids"])), float(one["score"])) for one in text["checks"]),
        trained=text["trained"],
    )


# ---- A network of several heads: what people will say of a response, each thing as 0 to 1. Its reward is the
# weighted mean of the heads' shares, moved to −1 … 1.


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


def _heads_card(text: Mapping[str, Any]) -> HeadsCard:
    return HeadsCard(
        base=text["base"],
        max_tokens=int(text["max_tokens"]),
        heads=parse_heads(text["heads"]),
        calibrations={name: Calibration(*map(float, one)) for name, one in text["calibrations"].items()},
        weights={name: float(weight) for name, weight in text["weights"].items()},
        checks=tuple((tuple(one["ids"]), tuple(one["given"])) for one in text["checks"]),
        trained=text["trained"],
    )


class HeadsModel(SavedModel):
    """A network with its heads."""

    def __init__(self, network: Network, encoder: Encoder, card: HeadsCard, by: ScoredBy) -> None:
        super().__init__(network, encoder, by)
        self.card = card

    @classmethod
    def load(cls, folder: Path, *, base: str | None = None, device: str = "cpu") -> Self:
        """Read a folder that `save` wrote. base: where the base model lies now, where it has moved.

        Raises ConfigurationError for a folder that holds none, or gives other numbers than in training.
        """
        card = _read_card(folder, HEADS_CARD, _heads_card)
        network = load_network(folder, base, is_trainable=True).to(torch.device(device)).eval()
        found = np.array(output_rows(network, [ids for ids, _ in card.checks]))
        if not np.allclose(found, [given for _, given in card.checks], rtol=TOLERANCE, atol=TOLERANCE):
            raise ConfigurationError(
                f"{folder}: gives other numbers than when it was trained: is its base model ({card.base}) "
                "another one now? Say where the right one is with --base"
            )
        digest = hashlib.sha256(weights_sha256(folder).encode())
        digest.update((folder / HEADS_CARD).read_bytes())
        by = ScoredBy(name=folder.resolve().name, sha256=digest.hexdigest())
        return cls(network, Encoder(load_tokenizer(str(folder)), card.max_tokens), card, by)

    def judge(self, samples: Sequence[Sample]) -> list[Judgement]:
        return self.judge_rows([self.encode(sample) for sample in samples])

    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        rewards = [2 * one.reward - 1 for one in self.judge_rows(rows)]
        return checked(rewards, len(rows), self.by.name)

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
        from penstock.workloads.language.reward.fitting import checks_of, fit  # noqa: PLC0415 - a Trainer

        chosen = settings or RewardTraining.model_validate(self.card.trained["settings"])
        found = to_opinions(((f"row {number}", row) for number, row in enumerate(rows, 1)), self.card.heads)
        sides = split_opinions(found.examples, share=chosen.validation_share, seed=chosen.seed)
        train, validation = (encode(side, self.encoder, found.bad, self.card.heads) for side in sides)
        if not train:
            lines = "; ".join(found.bad.lines()) or "none rates what a head is for"
            raise ValueError(f"{len(rows)} rows of feedback: no row can be used: {lines}")
        device = "cpu" if self.network.device.type == "cpu" else None
        fitted = fit(self.network, train, validation, self.card.heads, chosen, stop, device=device)
        checks = checks_of(self.network, train)
        trained = {**self.card.trained, "settings": chosen.model_dump(mode="json")}
        self.card = replace(self.card, calibrations=fitted.calibrations, checks=checks, trained=trained)
        self.by = replace(self.by, sha256="")
        return fitted.measures

    def measured(self, place: str, part: str | None = None) -> HeadsMeasures:
        """Return the measures over all feedback of a place; raises ConfigurationError."""
        from penstock.workloads.language.reward.fitting import judge  # noqa: PLC0415 - a Trainer

        found = read_opinions(place, self.card.heads, part)
        items = encode(found.examples, self.encoder, found.bad, self.card.heads)
        return judge(self.network, items, self.card.heads)[1]

    def save(self, folder: Path) -> None:
        """Write the model; `heads.json` last, so that a folder with one is whole."""
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
        _write(self.network, self.encoder.tokenizer, folder, HEADS_CARD, text)

    def judge_rows(self, rows: Sequence[Sequence[int]]) -> list[Judgement]:
        """Return what people will say of rows that `encode` made; raises BadReward for one not finite."""
        names = [*(one.name for one in self.card.heads), PREFERRED]
        given = np.array(output_rows(self.network, rows)).reshape(len(rows), len(names))
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
