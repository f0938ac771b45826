"""What `policy.kwargs` says of a language model, validated like the rest of the configuration."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from penstock.config.sections import PolicySection, Positive, PositiveReal, Section
from penstock.config.settings import ConfigurationError


class LanguageSection(Section):
    """Which model, and what of it is trained. `policy.kwargs` of a run."""

    model: str = Field(min_length=1)
    """Folder, or hub name, of a causal language model in Hugging Face format."""
    begin_with: str = ""
    """File of weights that this training begins with, such as `RUN/policies/7.safetensors` of a run alike.

    Empty: it begins with the model as it is, which stays the reference of the KL penalty either way.
    """
    lora: bool = True
    """Train a low-rank adapter; false: all weights."""
    rank: Positive = 16
    """Rank of the adapter."""
    alpha: PositiveReal = 32.0
    """Its scale: updates are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that have one, such as ["q_proj", "v_proj"].

    Empty: all linear layers but the last.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are not trained; what is trained is float32."""
    shared_trunk: bool = True
    """The value loss trains the policy's features too, where they are what the critic reads.

    False: only the value head, on features as they are.
    """
    critic: Literal["head", "adapter"] = "head"
    """What values are made of: the policy's features, or those of an adapter that the critic has of its own.

    The second takes another pass over the model, and the value loss then trains nothing of the policy.
    """
    gradient_checkpointing: bool = False
    """Compute activations twice and hold fewer of them."""


def language_section(section: PolicySection) -> LanguageSection:
    """Return what a policy section says; raises ConfigurationError that names key, value and remedy."""
    _check_others(section)
    try:
        settings = LanguageSection.model_validate(section.kwargs)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("policy.kwargs", *first["loc"])))
        raise ConfigurationError(f"{name}={_given(first)}: {first['msg']}") from error
    if not settings.lora and settings.dtype != "float32":
        raise ConfigurationError(
            f"policy.kwargs.dtype={settings.dtype!r}: all weights are trained, in float32; leave it out, and "
            "say learner.precision=bfloat16 to compute in bfloat16"
        )
    if not settings.lora and settings.critic == "adapter":
        raise ConfigurationError(
            "policy.kwargs.critic='adapter': reads the weights that lora=true leaves as they are, and "
            "lora=false trains all of them; say lora=true, or leave critic out"
        )
    return settings


def _given(error: Mapping[str, Any]) -> str:
    return "" if error["type"] == "missing" else repr(error["input"])


def _check_others(section: PolicySection) -> None:
    """Keys that say how a network for control is made would say nothing here."""
    usual = PolicySection()
    for name in PolicySection.model_fields:
        if name != "kwargs" and getattr(section, name) != getattr(usual, name):
            raise ConfigurationError(
                f"policy.{name}={getattr(section, name)!r}: a language model has none; leave it out, and "
                "use policy.kwargs"
            )
