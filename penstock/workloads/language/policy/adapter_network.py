"""The network behind a language policy: a causal model of transformers, with or without a LoRA of peft."""

import copy
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.loading import LOADING, place_of, unreadable
from penstock.workloads.language.policy.policy_section import LanguageSection

Network = Any
"""A transformers.PreTrainedModel or peft.PeftModel, which come without types."""

_ADAPTER = "default"
"""What peft calls the first adapter of a model."""


def make_network(section: LanguageSection, seed: int) -> Network:
    """The model, with a new adapter where LoRA is asked for, which changes nothing until it is trained."""
    network = _base(section)
    network.requires_grad_(not section.lora)
    if section.lora:
        network = _with_adapter(network, section, seed)
    if section.gradient_checkpointing:
        network.activation_checkpointing_enable({"use_reentrant": False})
    return network.eval()


def _base(section: LanguageSection) -> Network:
    place = place_of("policy.kwargs.model", section.model)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        _forget_dropout(config)
        _fuse_activations(config)
        with LOADING:
            return AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=getattr(torch, section.dtype),
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, SafetensorError) as error:
        what = "cannot be read as a causal language model"
        raise unreadable("policy.kwargs.model", section.model, what, error) from error


def _forget_dropout(config: Any) -> None:
    """Keep dropout off: log-probabilities are compared between processes, and with themselves."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)


def _fuse_activations(config: Any) -> None:
    """GPT-2's activation in one kernel, where transformers writes the same function as eight."""
    for name, value in vars(config).items():
        if value == "gelu_new":
            setattr(config, name, "gelu_pytorch_tanh")


def _with_adapter(network: Network, section: LanguageSection, seed: int) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(
                network,
                LoraConfig(
                    task_type=TaskType.CAUSAL_LM,
                    r=section.rank,
                    lora_alpha=section.alpha,
                    target_modules=list(section.targets) or "all-linear",
                ),
            )
        except ValueError as error:
            raise ConfigurationError(f"policy.kwargs.targets={list(section.targets)!r}: {error}") from error


def beside(network: Network) -> Network:
    """Return another network over the same frozen weights, with a copy of the adapter as its own."""
    frozen = {id(weight): weight for weight in network.parameters() if not weight.requires_grad}
    return copy.deepcopy(network, frozen)


def width(network: Network) -> int:
    return int(network.config.get_text_config().hidden_size)


def keep_fewer_activations(network: Network) -> None:
    """Compute activations twice; transformers does so in training mode only, and dropout is off."""
    network.train(torch.is_grad_enabled())


def trained(network: Network) -> dict[str, nn.Parameter]:
    """Return what has a gradient, by the name that it has in files of Hugging Face's format."""
    return {
        name.replace(f".{_ADAPTER}", ""): parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def read(network: Network, tokens: Tensor, present: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and the features [n, H] that they are made of, at n places of B·L.

    Only the wanted rows go through the last layer, whose output would else be the largest tensor by far.
    """
    return _read(network, tokens, present, place, has_logits=True)


def features(network: Network, tokens: Tensor, present: Tensor, place: Tensor) -> Tensor:
    return _read(network, tokens, present, place, has_logits=False)[1]


def _read(
    network: Network, tokens: Tensor, present: Tensor, place: Tensor, *, has_logits: bool
) -> tuple[Tensor, Tensor]:
    kept: list[Tensor] = []

    def choose(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(given[0].flatten(0, 1).index_select(0, place))
        return (kept[0] if has_logits else kept[0][:0], *given[1:])

    handle = network.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        logits = network(input_ids=tokens, attention_mask=present.long(), use_cache=False).logits
    finally:
        handle.remove()
    return logits, kept[0]
