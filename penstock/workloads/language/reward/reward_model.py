"""A reward model: a transformer with one score, or several heads, in Hugging Face format.

    DIR/adapter_model.safetensors, adapter_config.json    adapter and head; without LoRA model.safetensors
    DIR/config.json, tokenizer…                           one number: `reward` has mean, std, …
    DIR/reward.json, or heads.json                        what was learned from what, and scores to check

docs/rlhf.md reads one by transformers and peft alone. Nothing of it is pickled and no code of a model's
repository is run.
"""

import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from pydantic import BaseModel, ConfigDict
from torch import Tensor, tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from penstock.config.settings import ConfigurationError
from penstock.rpc.address import is_local as is_local_address
from penstock.rpc.auth import Credentials
from penstock.workloads.language.cached_generation import device_of
from penstock.workloads.language.feedback import BadRows, Example, Judged, Preference, Scored
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
from penstock.workloads.language.reward.reward_client import DEADLINE_S, PLAINTEXT, HttpRewards, RewardClient
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    BadSample,
    CallableRewards,
    Rewards,
    RewardSource,
    Sample,
    ScoredBy,
    checked,
)
from penstock.workloads.language.settings import (
    LOADING,
    RewardTraining,
    as_configuration_error,
    check_adapter,
    place_of,
    reading,
)
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer, pad

BATCH_TOKENS: Final = 16_384
"""Most token places, padding too, of one forward pass: bounds its memory."""

HEADS: Final = ("score", "classifier")
"""Attributes of transformers' classification models that hold the head."""

Network = Any
"""A transformers.PreTrainedModel or peft.PeftModel, which come without types."""


def build(base: str, settings: RewardTraining, pad_id: int, *, outputs: int = 1) -> Network:
    """Return a float32 network with a new head, and a new adapter for LoRA. outputs: of the head."""
    torch.manual_seed(settings.seed)
    network = classifier(base, num_labels=outputs, pad_token_id=pad_id, problem_type="regression")
    if not settings.lora:
        return network
    heads = [name for name in HEADS if hasattr(network, name)]
    if not heads:
        raise ConfigurationError(
            f"model={base}: {type(network).__name__} has none of the heads {', '.join(HEADS)}"
        )
    adapter = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear",
        modules_to_save=heads,
    )
    return get_peft_model(network, adapter)


def classifier(base: str, **options: Any) -> Network:
    place = place_of("model", base)
    with reading("model", base, "cannot be read as a model for classification"), LOADING:
        return AutoModelForSequenceClassification.from_pretrained(
            place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **options
        )


def output_rows(
    network: Network, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> list[list[float]]:
    """Return the head's outputs for rows of token ids in order; rows of similar length form a batch."""
    training = network.training
    network.eval()
    outputs: list[list[float]] = [[] for _ in rows]
    pad_id = network.config.get_text_config().pad_token_id
    try:
        with torch.inference_mode():
            for batch in _batches(rows, batch_tokens):
                ids, mask = (one.to(network.device) for one in pad([rows[index] for index in batch], pad_id))
                logits = network(input_ids=ids, attention_mask=mask).logits
                for index, given in zip(batch, logits.float().cpu().tolist(), strict=True):
                    outputs[index] = given
    finally:
        network.train(training)
    return outputs


def score_rows(
    network: Network, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> list[float]:
    """Return the scores of rows of token ids, in their order: the first output of the head."""
    return [given[0] for given in output_rows(network, rows, batch_tokens)]


def _batches(rows: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Return indices of rows by batch, whose padded size is at most the limit; a longer row is one alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        # Sorted by length: the newest row is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * len(rows[index]) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# ---- Examples as token ids, and batches of them: scored rows, then chosen ones, then rejected ones.


@dataclass(frozen=True, slots=True)
class Item:
    """An encoded example.

    rows: its one row of token ids, or (chosen, rejected). target: the score of one row, or its ratings by K
    heads, 0 to 1, NaN where unrated; None for a pair.
    """

    example: Example
    rows: tuple[list[int], ...]
    target: float | tuple[float, ...] | None


def encode(
    examples: Sequence[Example], encoder: Encoder, bad: BadRows, heads: Sequence[Head] = ()
) -> list[Item]:
    """Return the examples that fit as items, in order; `bad` counts the others."""
    items = []
    for example in examples:
        try:
            items.append(_item(example, encoder, heads))
        except ValueError as error:
            bad.add(example.where, str(error))
    return items


def _item(example: Example, encoder: Encoder, heads: Sequence[Head]) -> Item:
    prompt = encoder.prompt_ids(example.prompt)
    texts = (example.chosen, example.rejected) if isinstance(example, Preference) else (example.response,)
    target: float | tuple[float, ...] | None = None
    match example:
        case Scored():
            target = example.score
        case Judged():
            target = tuple(example.shares.get(head.name, math.nan) for head in heads)
    rows = tuple(encoder.join(prompt, encoder.response_ids(one)) for one in texts)
    if rows[1:] == rows[:1]:
        raise ValueError("chosen and rejected are the same tokens: nothing can be learned from them")
    return Item(example, rows, target)


@dataclass(frozen=True, slots=True)
class Collate:
    """Makes a batch: `input_ids`, `attention_mask` int64 [S + 2P, T], `targets` float32 [S], or [S, K]."""

    pad_id: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        scored, pairs = sides_of(items)
        ids, mask = pad(
            [item.rows[0] for item in (*scored, *pairs)] + [item.rows[1] for item in pairs], self.pad_id
        )
        targets = tensor([item.target for item in scored]).float()
        return {"input_ids": ids, "attention_mask": mask, "targets": targets}


def sides_of(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    sides: tuple[list[Item], list[Item]] = [], []
    for item in items:
        sides[item.target is None].append(item)
    return sides


# ---- Saved models: the network, and a card that records the training.

CARD: Final = "reward.json"
HEADS_CARD: Final = "heads.json"
TOLERANCE: Final = 1e-3
"""Most relative difference of the scores of recorded rows on another machine."""

C = TypeVar("C", bound="_Card")


class Scores(BaseModel):
    """A row of token ids, and its score."""

    ids: tuple[int, ...]
    score: float


class Numbers(BaseModel):
    """A row of token ids, and the outputs of all heads."""

    ids: tuple[int, ...]
    given: tuple[float, ...]


class _Card(BaseModel):
    model_config = ConfigDict(frozen=True)

    base: str
    max_tokens: int
    trained: dict[str, Any]


class Card(_Card):
    """The content of `reward.json`. mean, std: of the scores of a reference set."""

    mean: float
    std: float
    checks: tuple[Scores, ...]


class HeadsCard(_Card):
    """The content of `heads.json`. heads: NAME=SCALE. weights: of each head in the reward."""

    heads: tuple[str, ...]
    calibrations: dict[str, Calibration]
    weights: dict[str, float]
    checks: tuple[Numbers, ...]


def save(network: Network, tokenizer: Any, card: Card | HeadsCard, folder: Path) -> None:
    """Write a model; the card last, so that a folder with a card is complete."""
    if isinstance(card, Card):
        network.config.reward = {"mean": card.mean, "std": card.std, "max_tokens": card.max_tokens}
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder, safe_serialization=True)
    network.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    name = CARD if isinstance(card, Card) else HEADS_CARD
    (folder / name).write_text(json.dumps(card.model_dump(), indent=1) + "\n")


def _read_card(folder: Path, name: str, kind: type[C]) -> C:
    try:
        return kind.model_validate(json.loads((folder / name).read_text()))
    except FileNotFoundError as error:
        wanted = "that `penstock rlhf reward train` wrote" if name == CARD else "of a model with heads"
        raise ConfigurationError(f"{folder}: holds no {name}: name a folder {wanted}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder / name}: cannot be read: {error}") from error


def weights_sha256(folder: Path) -> str:
    """Return a digest of the weights, the configuration and the tokenizer in a folder."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]):
        if path.exists():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def load_network(folder: Path, base: str | None, *, is_trainable: bool = False) -> Network:
    """Return the network of a folder, with its adapter on the base model where it has one.

    base: folder of the base model where it has moved; None: the recorded one. is_trainable: the adapter may
    be trained further. Raises ConfigurationError.
    """
    if not (folder / "adapter_config.json").exists():
        return classifier(str(folder))
    check_adapter(folder)
    place = base or PeftConfig.from_pretrained(folder).base_model_name_or_path
    if place.startswith("./"):  # beside the folder, as versions of the gateway have it
        place = str(folder.parent / place)
    with as_configuration_error(f"{folder}: its settings cannot be read", OSError, ValueError):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        network = classifier(place, config=config)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{folder}: the base model of its adapter: {error}; say where it is with --base"
        ) from error
    return PeftModel.from_pretrained(network, folder, is_trainable=is_trainable)


def _checked_network(folder: Path, card: Card | HeadsCard, base: str | None, device: str) -> Network:
    """Return the network of a folder; raises ConfigurationError where it gives other scores than recorded."""
    network = load_network(folder, base, is_trainable=isinstance(card, HeadsCard))
    network.to(torch.device(device)).eval()
    checks: Sequence[Scores | Numbers] = card.checks
    found = output_rows(network, [one.ids for one in checks])
    recorded = [(one.score,) if isinstance(one, Scores) else one.given for one in checks]
    for given, numbers in zip(recorded, found, strict=True):
        for expected, number in zip(given, numbers, strict=True):
            if not abs(number - expected) <= TOLERANCE * max(1.0, abs(expected)):  # NaN is no score
                raise ConfigurationError(
                    f"{folder}: gives {number:.4f} where it gave {expected:.4f} when it was trained: is its "
                    f"base model ({card.base}) another one now? Say where the right one is with --base"
                )
    return network


class RewardModel:
    """A saved model of one score. One thread uses it at a time."""

    def __init__(self, network: Network, encoder: Encoder, card: Any, by: ScoredBy) -> None:
        self.network, self.encoder, self.card, self.by = network, encoder, card, by
        self.vocabulary = network.get_input_embeddings().num_embeddings

    @classmethod
    def load(cls, folder: Path, *, base: str | None = None, device: str = "cpu") -> Self:
        """Read a folder that `save` wrote. base: folder of the base model where it has moved.

        Raises ConfigurationError for a folder without a model, and for scores other than the recorded ones,
        which another base model or another head would give.
        """
        card = _read_card(folder, CARD, Card)
        return cls._over(folder, card, base, device, weights_sha256(folder), mean=card.mean, std=card.std)

    @classmethod
    def _over(
        cls, folder: Path, card: Any, base: str | None, device: str, sha256: str, **measured: float
    ) -> Self:
        network = _checked_network(folder, card, base, device)
        encoder = Encoder(load_tokenizer(str(folder)), card.max_tokens)
        return cls(network, encoder, card, ScoredBy(name=folder.resolve().name, sha256=sha256, **measured))

    def encode(self, sample: Sample) -> list[int]:
        """Return the row of token ids to score.

        Raises BadSample for a response that does not fit, and for ids of another tokenizer.
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

    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        """Return scores of rows that `encode` made; raises BadReward for one that is not finite."""
        return checked(score_rows(self.network, rows), len(rows), self.by.name)

    def score(self, samples: Sequence[Sample]) -> Rewards:
        return Rewards(self.score_rows([self.encode(sample) for sample in samples]), self.by)

    def close(self) -> None:
        """Do nothing: no connection is open."""


# ---- A model of several heads: it predicts ratings of a response, each 0 to 1. The reward is the weighted
# mean of the predictions, mapped to −1 … 1.


@dataclass(frozen=True, slots=True)
class Judgement:
    """Predictions for a response. shares: 0 to 1 by head, with the head of pairs. reward: 0 to 1."""

    shares: dict[str, float]
    reward: float


class HeadsModel(RewardModel):
    """A saved model of several heads, which may be trained further."""

    def __init__(self, network: Network, encoder: Encoder, card: HeadsCard, by: ScoredBy) -> None:
        super().__init__(network, encoder, card, by)
        self.heads = parse_heads(card.heads)

    @classmethod
    def load(cls, folder: Path, *, base: str | None = None, device: str = "cpu") -> Self:
        card = _read_card(folder, HEADS_CARD, HeadsCard)
        digest = hashlib.sha256(weights_sha256(folder).encode() + (folder / HEADS_CARD).read_bytes())
        return cls._over(folder, card, base, device, digest.hexdigest())

    def save(self, folder: Path) -> None:
        """Write the model; `heads.json` last, so that a folder with that file is complete."""
        save(self.network, self.encoder.tokenizer, self.card, folder)

    def judge(self, samples: Sequence[Sample]) -> list[Judgement]:
        return self.judge_rows([self.encode(sample) for sample in samples])

    def judge_rows(self, rows: Sequence[Sequence[int]]) -> list[Judgement]:
        """Return the predictions for rows that `encode` made; raises BadReward for outputs not finite."""
        names = [*(one.name for one in self.heads), PREFERRED]
        given = np.array(output_rows(self.network, rows)).reshape(len(rows), len(names))
        if not np.isfinite(given).all():
            raise BadReward(f"{self.by.name}: gives numbers that are not finite")
        shares = [self.card.calibrations[name].share(given[:, k]).tolist() for k, name in enumerate(names)]
        found = [dict(zip(names, one, strict=True)) for one in zip(*shares, strict=True)]
        return [Judgement(one, self._reward(one)) for one in found]

    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        rewards = [2 * one.reward - 1 for one in self.judge_rows(rows)]
        return checked(rewards, len(rows), self.by.name)

    def score_response(
        self, user_msg: Prompt, response: str, feedback: Mapping[str, Any] | None = None
    ) -> float:
        """Return the reward of a response to a message, 0 to 1.

        feedback: ratings of this response by head, each on the head's scale; they replace the predictions.
        Raises BadSample, and ValueError for feedback that names no head or is not on its scale.
        """
        [found] = self.judge([Sample(prompt=user_msg, response=response)])
        heads = {one.name: one for one in self.heads}
        for name in feedback or {}:
            if name not in heads:
                raise ValueError(
                    f"feedback[{name!r}]: there is no such head; this model has {', '.join(heads)}"
                )
        rated = {name: heads[name].share(raw) for name, raw in (feedback or {}).items()}
        return self._reward({**found.shares, **rated})

    def update_from_feedback(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        settings: RewardTraining | None = None,
        stop: threading.Event | None = None,
    ) -> HeadsMeasures:
        """Train the model further on rows of feedback, and return measures of the rows held out.

        rows: new rows, and the earlier ones that it should remember. Raises ValueError where no row can be
        used, Interrupted once `stop` is set.
        """
        from penstock.workloads.language.reward.training import checks_of, fit_heads  # noqa: PLC0415 - a Trainer

        chosen = settings or RewardTraining.model_validate(self.card.trained["settings"])
        found = to_opinions(((f"row {number}", row) for number, row in enumerate(rows, 1)), self.heads)
        sides = split_opinions(found.examples, share=chosen.validation_share, seed=chosen.seed)
        train, validation = (encode(side, self.encoder, found.bad, self.heads) for side in sides)
        if not train:
            lines = "; ".join(found.bad.lines()) or "none rates what a head is for"
            raise ValueError(f"{len(rows)} rows of feedback: no row can be used: {lines}")
        device = "cpu" if self.network.device.type == "cpu" else None
        _, calibrations, measures = fit_heads(
            self.network, train, validation, self.heads, chosen, stop, device=device
        )
        changed = {
            "calibrations": calibrations,
            "checks": tuple(Numbers(ids=ids, given=given) for ids, given in checks_of(self.network, train)),
            "trained": {**self.card.trained, "settings": chosen.model_dump(mode="json")},
        }
        self.card = self.card.model_copy(update=changed)
        self.by = replace(self.by, sha256="")
        return measures

    def measured(self, place: str, part: str | None = None) -> HeadsMeasures:
        """Return the measures on all feedback of a place; raises ConfigurationError."""
        from penstock.workloads.language.reward.training import judge  # noqa: PLC0415 - a Trainer

        found = read_opinions(place, self.heads, part)
        items = encode(found.examples, self.encoder, found.bad, self.heads)
        return judge(self.network, items, self.heads)[1]

    def _reward(self, shares: Mapping[str, float]) -> float:
        weights: dict[str, float] = self.card.weights
        return sum(weights[name] * shares[name] for name in weights) / sum(weights.values())


# ---- The source of rewards by its text: an address, an endpoint, a function, or the folder of a model.


def open_source(
    text: str,
    *,
    credentials: Credentials = PLAINTEXT,
    base: str | None = None,
    device: str = "cpu",
    deadline_s: float = DEADLINE_S,
    headers: Mapping[str, str] | None = None,
) -> RewardSource:
    """Return the source that a text names.

    text: of this machine's configuration, because a function that it names is imported. base, device: of the
    model in a folder. deadline_s: of a call to a service or endpoint. headers: for an HTTP endpoint. Raises
    ConfigurationError for any other text, and for headers that would leave this machine unencrypted.
    """
    if text.startswith(("http://", "https://")):
        host = urlsplit(text).hostname or ""
        is_near = is_local_address(f"[{host}]:80" if ":" in host else f"{host}:80")
        if headers and text.startswith("http://") and not credentials.insecure and not is_near:
            raise ConfigurationError(
                f"reward={text!r}: security.http_headers_file would cross the network in plain words; use "
                "https://, or say --set security.insecure=true"
            )
        return HttpRewards(text, deadline_s=deadline_s, headers=headers)
    if text.startswith(("grpc://", "unix:")):
        with as_configuration_error(f"reward={text!r}", ValueError):
            address = text.removeprefix("grpc://")
            return RewardClient(address, credentials=credentials, deadline_s=deadline_s)
    if Path(text).is_dir():
        return load_model(Path(text), base=base, device=device)
    if ":" in text and "/" not in text:
        return CallableRewards(text)
    raise ConfigurationError(
        f"reward={text!r}: name a reward model's folder, grpc://HOST:PORT, unix:/path, http(s)://…, or "
        "module:function"
    )


def load_model(folder: Path, *, base: str | None, device: str) -> RewardModel:
    """Return the reward model in a folder, of one score or of several heads.

    base: folder of the base model where it has moved. device: as torch names it, or "auto". Raises
    ConfigurationError for a folder without a model.
    """
    kind = HeadsModel if (folder / HEADS_CARD).exists() else RewardModel
    return kind.load(folder, base=base, device=device_of(device))
