"""Settings of language workloads from the command line and `environment.kwargs`, and how models are read."""

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from penstock.config.sections import Count, NonNegative, Positive, PositiveReal, Section
from penstock.config.settings import ConfigurationError, merge, parse_assignment

LOADING: Final = threading.Lock()
"""Held while transformers reads a model: it then changes torch for the whole process.

Two threads at once would leave it changed, and every model that is read later would have no weights.
"""


def place_of(field: str, name: str) -> str:
    """Return a local folder as an absolute path, or a hub name, `NAME` or `OWNER/NAME`, as it is."""
    folder = Path(name)
    if folder.exists():
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"{field}={name!r}: there is no such folder; name one that is there")
    return name


@contextmanager
def reading(field: str, name: str, what: str, *more: type[Exception]) -> Iterator[None]:
    """Make errors of transformers a ConfigurationError of a field. what: the first words of the reason."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except kinds as error:
        if Path(name).exists():
            raise ConfigurationError(f"{field}={name!r}: {what}: {error}") from error
        cause = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{field}={name!r}: {what}: there is no such folder, and the hub gave no model of this name "
            f"({cause}); name a folder that is there, or a model of the hub that this machine can read"
        ) from error


def check_adapter(folder: Path) -> None:
    """Raise ConfigurationError for an adapter whose weights or settings could run code.

    peft unpickles an `adapter_model.bin` where the safetensors are absent, and imports the module that
    `megatron_core` names where `megatron_config` is set.
    """
    if not (folder / "adapter_model.safetensors").exists():
        found = "adapter_model.bin, which is a pickle" if (folder / "adapter_model.bin").exists() else "none"
        raise ConfigurationError(
            f"{folder}: an adapter needs adapter_model.safetensors; found: {found}; save it again with "
            "save_pretrained(…, safe_serialization=True)"
        )
    with as_configuration_error(f"{folder / 'adapter_config.json'}: not JSON", ValueError):
        config = json.loads((folder / "adapter_config.json").read_text())
    if not isinstance(config, dict) or config.get("megatron_config"):
        raise ConfigurationError(
            f"{folder / 'adapter_config.json'}: its megatron_config names a module to import: remove it"
        )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets its name when all of it is written."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    yield temporary
    temporary.rename(folder)


def quieten() -> None:
    """Switch off the progress bars and warnings that transformers writes to stderr."""
    from transformers.utils import logging  # noqa: PLC0415 - only where a model is read

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


S = TypeVar("S", bound=Section)


@contextmanager
def as_configuration_error(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Make errors of some classes a ConfigurationError whose text begins with `where`."""
    try:
        yield
    except kinds as error:
        raise ConfigurationError(f"{where}: {error}") from error


def assigned_settings(kind: type[S], assignments: Sequence[str]) -> S:
    """Return a section with `KEY=VALUE` assignments over its defaults; raises ConfigurationError."""
    layer: dict[str, object] = {}
    for text in assignments:
        layer = merge(layer, parse_assignment(text))
    return validated(kind, layer)


def validated(kind: type[S], values: Mapping[str, Any], *prefix: str) -> S:
    """Return a section; raises ConfigurationError, which names its first mistake. prefix: of its keys."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (*prefix, *first["loc"])))
        given = "" if first["type"] == "missing" else repr(first["input"])
        raise ConfigurationError(f"{name}={given}: {first['msg']}") from error


def kwargs_settings(
    kind: type[S], kwargs: Mapping[str, Any], remark: Callable[[str], str] = lambda _: ""
) -> S:
    """Return `environment.kwargs` as a section; raises ConfigurationError with a line per mistake.

    remark: returns the reason for a refused key; "": the usual reason.
    """
    try:
        return kind.model_validate(kwargs)
    except ValidationError as error:
        lines = []
        for one in error.errors():
            key, why = ".".join(map(str, one["loc"])), one["msg"]
            where = f"environment.kwargs.{key}={one['input']!r}"
            if reason := remark(key):
                why = reason
            elif one["type"] == "extra_forbidden":
                where = f"environment.kwargs.{key}"
                why = f"unknown key; use one of {', '.join(sorted(kind.model_fields))}"
            lines.append(f"{where}: {why}")
        raise ConfigurationError("\n".join(lines)) from error


class GuardSection(Section):
    """What guards a server of text: a part of `environment.kwargs`."""

    guard: bool = False
    """Whether a server of text checks what it is asked and what it answers, by built-in rules."""
    guard_rules: str = ""
    """File of further rules, as `penstock chat guard check --rules` takes."""
    guard_classifier: str = ""
    """File of `penstock chat guard train`: it checks what the server is asked."""


class RewardTraining(Section):
    """Settings of a reward model's training. The defaults suit LoRA on models of 0.1 to 2 billion weights."""

    epochs: PositiveReal = 2.0
    """Passes over the training examples."""
    batch: Positive = 32
    """Examples of one optimiser step; a pair counts once."""
    micro_batch: Positive | None = None
    """Examples of one forward pass; none: the whole batch. The batch must be a multiple of it."""
    learning_rate: PositiveReal = 1e-4
    """Highest step size; LoRA wants about ten times that of full fine-tuning."""
    warmup: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the steps in which the step size rises from 0."""
    schedule: Literal[
        "linear",
        "cosine",
        "constant",
        "constant_with_warmup",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_restarts",
    ] = "cosine"
    """Schedule of the learning rate after the warm-up: those of transformers without further options."""
    weight_decay: NonNegative = 0.0
    """Of AdamW."""
    max_gradient_norm: PositiveReal = 1.0
    """Gradients are clipped to this norm."""
    centring: NonNegative = 0.01
    """Weight of (chosen + rejected)² in the loss of pairs, which alone would not determine where zero is."""
    lora: bool = True
    """Train a low-rank adapter; false: all weights."""
    rank: Positive = 16
    """Rank of the adapter."""
    alpha: PositiveReal = 32.0
    """Its scale: updates are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """On the input of the adapter, in training only."""
    max_tokens: Positive = 1024
    """Longest prompt and response together; what is longer loses the beginning of its prompt."""
    gradient_checkpointing: bool = False
    """Compute activations twice and hold fewer of them."""
    validation_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """Share of the examples, by prompt, that only validate; 0: none, and the last weights are kept."""
    patience: Count = 0
    """Stop after so many epochs without a better validation loss; 0: never.

    The best weights are kept either way.
    """
    seed: Count = 0
    """Of the split, the new weights and the order of the examples."""


def training_settings(assignments: Sequence[str] = ()) -> RewardTraining:
    settings = assigned_settings(RewardTraining, assignments)
    if settings.micro_batch is not None and settings.batch % settings.micro_batch:
        raise ConfigurationError(
            f"micro_batch={settings.micro_batch}: batch={settings.batch} is no multiple of it"
        )
    return settings
