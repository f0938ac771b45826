"""A causal language model as a policy.

Rows of tokens in, log-probabilities and values of the next tokens out.

    network     what generates; all of it, or its adapter, is trained and published, and is the `state_dict`
    critic      makes values of the features that the last layer reads, or of its own; stays with the learner
    reference   the policy that training began with: the network with its adapter switched off, or a copy

Used by one thread.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.tokens import TokenOutputs, TokenRows
from penstock.policy.weights import load_into
from penstock.protocol.spaces import Discrete, Space
from penstock.protocol.tensor import Array
from penstock.workloads.language.loading import LOADING, place_of, unreadable
from penstock.workloads.language.policy.policy_section import LanguageSection, language_section

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


def read(
    network: Network, tokens: Tensor, present: Tensor, place: Tensor, *, has_logits: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits [n, V], or none, and the features [n, H] that they are made of, at n places of B·L.

    Only the wanted rows go through the last layer, whose output would else be the largest tensor by far.
    """
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


# ---- The values of a language policy are made by these; they stay with the learner.


class ValueHead(nn.Module):
    """Features [n, H] → values [n]; 0 until it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, features: Tensor) -> Tensor:
        values: Tensor = self.last(torch.tanh(self.hidden(features)))
        return values.squeeze(-1)


class AdapterCritic(nn.Module):
    """A network beside the policy's, over the same frozen weights, and a head.

    Its parameters and its `state_dict` are the adapter and the head alone: the frozen weights are not its
    own. Neither adapter is ever active in the other's network, so that no pass has to switch them, a pass
    that checkpoints activations and computes them again in the backward pass neither.
    """

    def __init__(self, policy: Network, *, checkpoints: bool) -> None:
        """policy: network with an adapter. checkpoints: whether activations are computed twice."""
        super().__init__()
        self.network = beside(policy)
        self.head = ValueHead(width(policy))
        self._checkpoints = checkpoints

    def forward(self, rows: TokenRows) -> Tensor:
        """Return the values V of n places, float32 [n]; one more pass over the frozen weights."""
        if self._checkpoints:
            keep_fewer_activations(self.network)
        _, features = read(self.network, rows.tokens, rows.present, rows.place, has_logits=False)
        values: Tensor = self.head(features.float()).float()
        return values

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what is trained: the adapter and the head."""
        for part, own in (("adapter", trained(self.network)), ("head", dict(self.head.named_parameters()))):
            yield from ((f"{part}.{name}", parameter) for name, parameter in own.items())

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained, sharing its memory."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


class LanguagePolicy(nn.Module):
    """A `penstock.policy.tokens.TokenPolicy`. has_reference: with the copy that holds all weights."""

    def __init__(self, section: LanguageSection, seed: int, *, has_reference: bool = True) -> None:
        super().__init__()
        self.section = section
        self.network = make_network(section, seed)
        self._frozen = None if section.lora or not has_reference else _frozen(self.network)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.critic = self._make_critic()

    def _make_critic(self) -> ValueHead | AdapterCritic:
        if self.section.critic == "adapter":
            return AdapterCritic(self.network, checkpoints=self.section.gradient_checkpointing)
        return ValueHead(width(self.network))

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows: ids 0 … V−1."""
        return int(self.network.get_output_embeddings().weight.shape[0])

    @property
    def positions(self) -> int | None:
        """Most tokens that it reads, prompt and response together; None: no bound is known."""
        most: int | None = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        return most

    @property
    def device(self) -> torch.device:
        device: torch.device = self.network.device
        return device

    # ---- what is published

    def trained(self) -> dict[str, nn.Parameter]:
        """Return what is published and trained, by the name that it has in an `adapter_model.safetensors`."""
        return trained(self.network)

    @property
    def published(self) -> nn.Module:
        return self

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """`trained`, sharing its memory; neither frozen weights nor the critic."""
        return {name: parameter.detach() for name, parameter in self.trained().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Inverse of `state_dict`; raises ValueError that names what is missing, unknown or misshapen."""
        own = self.state_dict()
        if own.keys() != state_dict.keys():
            raise ValueError(f"weights: {sorted(own.keys() ^ state_dict.keys())[:8]} on one side only")
        for name, tensor in own.items():
            if tensor.shape != state_dict[name].shape:
                raise ValueError(f"weights.{name}: {tuple(state_dict[name].shape)} for {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state_dict[name])

    # ---- what a learner asks

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        if self.section.gradient_checkpointing:
            keep_fewer_activations(self.network)
        logits, features = read(self.network, rows.tokens, rows.present, rows.place)
        log_probs = logits.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return TokenOutputs(_chosen(log_probs, rows.action), entropy, self._values(rows, features))

    def _values(self, rows: TokenRows, features: Tensor) -> Tensor:
        """Return V of the places; features: what the policy's last layer has read there."""
        if isinstance(self.critic, AdapterCritic):
            own: Tensor = self.critic(rows)
            return own
        read = features if self.section.shared_trunk else features.detach()
        values: Tensor = self.critic(read.float()).float()
        return values

    @torch.no_grad()
    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        """Log-probabilities of the actions under the policy that training began with, [n]."""
        with self._reference() as network:
            logits, _ = read(network, rows.tokens, rows.present, rows.place)
        return _chosen(logits.float().log_softmax(-1), rows.action)

    @contextmanager
    def _reference(self) -> Iterator[Network]:
        if self.section.lora:
            with self.network.disable_adapter():
                yield self.network
        else:
            assert self._frozen is not None, "this policy was made without a reference"
            yield self._frozen

    # ---- what an actor asks

    def load(self, blob: bytes) -> None:
        """Generate with these weights from now on, all or none; raises ValueError for those of another."""
        load_into(self, blob)

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        """Do nothing: tokens are sampled as the policy says."""

    def log_prob(self, observation: Mapping[str, Array], action: Mapping[str, Array]) -> NDArray[np.float32]:
        """Joint log-probability float32 [P] of each row's tokens. observation, action: whole rows, [P, L]."""
        tokens, following = (
            torch.from_numpy(np.array(arrays[name], np.int64)).to(self.device)
            for name, arrays in (("observation", observation), ("action", action))
        )
        place = torch.arange(tokens.numel(), device=self.device)
        with torch.inference_mode():
            rows = TokenRows(tokens, torch.ones_like(tokens, dtype=torch.bool), place, following.flatten())
            answer = self.outputs(rows).log_prob.view(tokens.shape).sum(1)
        result: NDArray[np.float32] = answer.cpu().numpy()
        return result

    def acting_log_prob(
        self, observation: Mapping[str, Array], action: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        """Return `log_prob` of the network that generates, float32 [P], for the probe."""
        return self.log_prob(observation, action)


def build(
    observation: Space,
    action: Space,
    section: PolicySection,
    seed: int,
    *,
    has_reference: bool = False,
    learns: bool = False,
) -> LanguagePolicy:
    """From the `policy` section of a run. learns: with the adapter of a critic, which learners ask."""
    language = language_section(section)
    if not learns:
        language = language.model_copy(update={"critic": "head"})
    policy = LanguagePolicy(language, seed, has_reference=has_reference)
    for name, space in (("observation", observation), ("action", action)):
        if not isinstance(space, Discrete) or space.n != policy.vocabulary:
            raise ConfigurationError(
                f"policy.kwargs.model={policy.section.model!r}: knows {policy.vocabulary} tokens, and the "
                f"{name} space is {space}; use the tokenizer that belongs to it"
            )
    return policy


def _chosen(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _frozen(network: Network) -> Network:
    return copy.deepcopy(network).requires_grad_(False)
