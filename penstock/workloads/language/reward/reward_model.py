"""A reward model: a transformer with one number as its head, in Hugging Face format, with or without LoRA.

    DIR/adapter_model.safetensors, adapter_config.json    adapter and head; without LoRA model.safetensors
    DIR/config.json                                       one label, pad token, `reward`: mean, std, …
    DIR/tokenizer…                                        the tokenizer
    DIR/reward.json                                       what was learned from what, and four scores to check

It is read by transformers and peft alone as well:

    config = AutoConfig.from_pretrained(DIR)
    base = AutoModelForSequenceClassification.from_pretrained(BASE, config=config, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, DIR)

Nothing of it is pickled and no code of a model's repository is run.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback.examples import Example, Preference, Scored
from penstock.workloads.language.loading import LOADING, check_adapter, place_of, unreadable
from penstock.workloads.language.prompt import identity
from penstock.workloads.language.reward.reward_source import BadSample, Rewards, Sample, ScoredBy, checked
from penstock.workloads.language.reward.training_section import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer, pad

CARD: Final = "reward.json"
BATCH_TOKENS: Final = 16_384
"""Most token places, padding too, of one forward pass: bounds its memory."""
HEADS: Final = ("score", "classifier")
"""What transformers calls the head of a model for classification."""
CHECKED: Final = 4
TOLERANCE: Final = 1e-3
"""How far the scores of the examples to check may differ on another machine."""

Network = Any
"""A transformers.PreTrainedModel or peft.PeftModel, which come without types."""


def build(base: str, settings: RewardTraining, pad_id: int, *, outputs: int = 1) -> Network:
    """A network with a new head on a base model, in float32, with a new adapter where LoRA is asked for.

    base: folder or hub name. outputs: numbers that the head gives.

    Raises ConfigurationError for a model that cannot be read or has no such head.
    """
    torch.manual_seed(settings.seed)
    network = _classifier(base, num_labels=outputs, pad_token_id=pad_id, problem_type="regression")
    if not settings.lora:
        return network
    heads = [name for name in HEADS if hasattr(network, name)]
    if not heads:
        raise ConfigurationError(
            f"model={base}: {type(network).__name__} has none of the heads {', '.join(HEADS)}"
        )
    return get_peft_model(
        network,
        LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="all-linear",
            modules_to_save=heads,
        ),
    )


def _classifier(base: str, **said: Any) -> Network:
    place = place_of("model", base)
    try:
        with LOADING:
            return AutoModelForSequenceClassification.from_pretrained(
                place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **said
            )
    except (OSError, ValueError) as error:
        raise unreadable("model", base, "cannot be read as a model for classification", error) from error


def max_tokens_of(network: Network, wanted: int) -> int:
    """`wanted`, or what the network's positions allow."""
    known = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    return wanted if not known else min(wanted, known)


def score_rows(
    network: Network, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> list[float]:
    """Scores of rows of token ids in their order: the first number of the head.

    The mode of the model stays as it is.
    """
    return [given[0] for given in output_rows(network, rows, batch_tokens)]


def output_rows(
    network: Network, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> list[list[float]]:
    """All numbers of the head for rows of token ids in their order, in batches of rows of similar length."""
    training = network.training
    network.eval()
    outputs: list[list[float]] = [[] for _ in rows]
    by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    try:
        with torch.inference_mode():
            for batch in _batches(by_length, rows, batch_tokens):
                ids, mask = pad(
                    [rows[index] for index in batch], network.config.get_text_config().pad_token_id
                )
                logits = network(
                    input_ids=ids.to(network.device), attention_mask=mask.to(network.device)
                ).logits
                for index, given in zip(batch, logits.float().cpu().tolist(), strict=True):
                    outputs[index] = given
    finally:
        network.train(training)
    return outputs


def _batches(order: Sequence[int], rows: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Consecutive parts of `order` whose padded size stays below the limit; a longer row is a batch alone."""
    batches: list[list[int]] = []
    for index in order:
        # Sorted by length: the newest row is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * len(rows[index]) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


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
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder, safe_serialization=True)
    config = network.config
    config.reward = {"mean": card.mean, "std": card.std, "max_tokens": card.max_tokens}
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = {
        "base": card.base,
        "max_tokens": card.max_tokens,
        "mean": card.mean,
        "std": card.std,
        "checks": [{"ids": list(ids), "score": score} for ids, score in card.checks],
        "trained": card.trained,
    }
    (folder / CARD).write_text(json.dumps(text, indent=1) + "\n")


class RewardModel:
    """A model that was saved; scores what it is shown. One thread at a time."""

    def __init__(self, network: Network, encoder: Encoder, by: ScoredBy) -> None:
        self.network, self.encoder, self.by = network, encoder, by
        self.vocabulary = network.get_input_embeddings().num_embeddings

    @classmethod
    def load(cls, folder: Path, *, base: str | None = None, device: str = "cpu") -> "RewardModel":
        """Read a folder that `save` wrote. base: where the base model lies now, where it has moved.

        Raises ConfigurationError for a folder that holds none, and for scores that are not those of training:
        another base model, or a head that is not the one that was trained.
        """
        card = _read_card(folder)
        tokenizer = load_tokenizer(str(folder))
        network = load_network(folder, base).to(torch.device(device))
        network.eval()
        _check(folder, network, card)
        by = ScoredBy(name=folder.resolve().name, sha256=weights_sha256(folder), mean=card.mean, std=card.std)
        return cls(network, Encoder(tokenizer, card.max_tokens), by)

    def encode(self, sample: Sample) -> list[int]:
        """Return the row of token ids that is scored; raises BadSample."""
        return encode_sample(sample, self.encoder, self.vocabulary)

    def score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        """Scores of rows that `encode` made; raises BadReward for one that is not finite."""
        return checked(score_rows(self.network, rows), len(rows), self.by.name)

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return scores as every source of rewards does; raises BadSample, BadReward."""
        return Rewards(self.score_rows([self.encode(sample) for sample in samples]), self.by)

    def close(self) -> None:
        """Do nothing: nothing is held open."""


def encode_sample(sample: Sample, encoder: Encoder, vocabulary: int) -> list[int]:
    """Return the row of token ids that is scored.

    vocabulary: how many tokens the model has. Raises BadSample for a response that does not fit, or ids that
    are of another tokenizer.
    """
    try:
        if not sample.response_ids:
            return encoder.encode(sample.prompt, sample.response, cut_short=sample.cut_short)
        ids = encoder.join(sample.prompt_ids, sample.response_ids)
    except ValueError as error:
        raise BadSample(str(error)) from error
    highest = max(ids)
    if highest >= vocabulary or min(ids) < 0:
        raise BadSample(f"token id {highest} of a vocabulary of {vocabulary}: use this model's tokenizer")
    return ids


def weights_sha256(folder: Path) -> str:
    """Return a digest of the weights in a folder and of what they were made for.

    It is a name for the scores that it gives.
    """
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
        return _classifier(str(folder))
    check_adapter(folder)
    place = base or PeftConfig.from_pretrained(folder).base_model_name_or_path
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: its settings cannot be read: {error}") from error
    try:
        network = _classifier(place, config=config)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{folder}: the base model of its adapter: {error}; say where it is with --base"
        ) from error
    return PeftModel.from_pretrained(network, folder, is_trainable=is_trainable)


def _read_card(folder: Path) -> Card:
    try:
        text = json.loads((folder / CARD).read_text())
        return Card(
            base=text["base"],
            max_tokens=int(text["max_tokens"]),
            mean=float(text["mean"]),
            std=float(text["std"]),
            checks=tuple((tuple(map(int, one["ids"])), float(one["score"])) for one in text["checks"]),
            trained=text["trained"],
        )
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder}: holds no {CARD}: name a folder that `penstock rlhf reward train` wrote"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{folder / CARD}: cannot be read: {error}") from error


def _check(folder: Path, network: Network, card: Card) -> None:
    found = score_rows(network, [ids for ids, _ in card.checks])
    for (_, expected), score in zip(card.checks, found, strict=True):
        if abs(score - expected) > TOLERANCE * max(1.0, abs(expected)):
            raise ConfigurationError(
                f"{folder}: gives {score:.4f} where it gave {expected:.4f} when it was trained: is its base "
                f"model ({card.base}) another one now? Say where the right one is with --base"
            )


# ---- How good a reward model is on examples that it was not trained on.

Array = NDArray[np.float64]

BINS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """None where nothing was there to measure it on.

    mse, mae: of scored examples. slope, intercept: of the line score = slope · prediction + intercept with
    the least squared error; 1 and 0 for a calibrated model. pair_accuracy: share of pairs in the right order,
    of those that were given and of scored responses to one prompt; an equal score counts half.
    calibration_error: expected calibration error of σ(difference) on the pairs that were given (Guo et al.
    2017, BINS bins of equal width).
    """

    scored: int = 0
    mse: float | None = None
    mae: float | None = None
    slope: float | None = None
    intercept: float | None = None
    pairs: int = 0
    pair_accuracy: float | None = None
    calibration_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the measures by name, as JSON holds them."""
        return asdict(self)


def measure(examples: Sequence[Example], scores: Sequence[tuple[float, ...]]) -> Measures:
    """Return measures of a model that gives these scores.

    scores: one for a scored example, (chosen, rejected) for a pair.
    """
    both = list(zip(examples, scores, strict=True))
    scored = [(example, given[0]) for example, given in both if isinstance(example, Scored)]
    given_pairs = np.array(
        [given[0] - given[1] for example, given in both if isinstance(example, Preference)], np.float64
    )
    margins = np.concatenate([given_pairs, _margins(scored)])
    truth = np.array([example.score for example, _ in scored], np.float64)
    predicted = np.array([score for _, score in scored], np.float64)
    slope, intercept = _line(predicted, truth)
    return Measures(
        scored=len(scored),
        mse=float(np.mean((predicted - truth) ** 2)) if scored else None,
        mae=float(np.mean(np.abs(predicted - truth))) if scored else None,
        slope=slope,
        intercept=intercept,
        pairs=len(margins),
        pair_accuracy=float(np.mean((np.sign(margins) + 1) / 2)) if len(margins) else None,
        calibration_error=expected_calibration_error(given_pairs) if len(given_pairs) else None,
    )


def doubt(found: Mapping[str, Any] | None) -> str:
    """Return why a run should not learn from a model with these measures (`Measures.as_dict`).

    "" where they give no reason.

    That is: its order of the validation pairs is less than two standard errors better than a coin's.
    """
    if not found or not found["pairs"]:
        return ""
    pairs, accuracy = found["pairs"], found["pair_accuracy"]
    margin = 1 / math.sqrt(pairs)
    if accuracy - 0.5 > margin:
        return ""
    return (
        f"pair_accuracy {accuracy:.3g} of {pairs} pairs is what chance gives (0.5 ± {margin:.2g}): a policy "
        "would learn noise; give the reward model more feedback, more epochs, a larger learning_rate or rank"
    )


def expected_calibration_error(margins: Array) -> float:
    """Return the mean distance of confidence σ(|margin|) from how often the order is right.

    The mean is over bins, weighted by their pairs.
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (np.sign(margins) + 1) / 2
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    total = 0.0
    for one in range(BINS):
        inside = bins == one
        if inside.any():
            total += float(inside.mean() * abs(confidence[inside].mean() - right[inside].mean()))
    return total


def _margins(scored: Sequence[tuple[Scored, float]]) -> Array:
    """Return the predicted difference, better minus worse, of every two responses to one prompt.

    Two responses of equal score are left out.
    """
    of_prompt: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for example, predicted in scored:
        of_prompt[identity(example.prompt)].append((example.score, predicted))
    found = [
        (first[1] - second[1]) * (1 if first[0] > second[0] else -1)
        for responses in of_prompt.values()
        for first, second in combinations(responses, 2)
        if first[0] != second[0]
    ]
    return np.array(found, np.float64)


def _line(predicted: Array, truth: Array) -> tuple[float | None, float | None]:
    if len(predicted) < 2 or np.ptp(predicted) == 0:
        return None, None
    slope, intercept = np.polyfit(predicted, truth, 1)
    return float(slope), float(intercept)
