"""A causal language model as a policy: rows of tokens to log-probabilities and values of the next tokens.

    network     generates; all of it, or its adapter, is trained and published, and is the `state_dict`
    critic      makes values from the features of the last layer, or from its own; stays with the learner
    reference   the policy that training began with: the network without its adapter, or a copy

Used by one thread.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, TaskType, get_peft_model
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.sections import PolicySection, Positive, PositiveReal, Section
from penstock.config.settings import ConfigurationError
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.tokens import TokenOutputs, TokenRows
from penstock.policy.weights import load_into
from penstock.protocol.spaces import Discrete, Space
from penstock.protocol.tensor import Array
from penstock.workloads.language.settings import LOADING, as_configuration_error, place_of, reading, validated


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
    """Return `policy.kwargs` as a section; raises ConfigurationError with key, value and remedy."""
    _check_others(section)
    settings = validated(LanguageSection, section.kwargs, "policy.kwargs")
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


def _check_others(section: PolicySection) -> None:
    """Raise ConfigurationError for keys of networks for control, which have no effect here."""
    usual = PolicySection()
    for name in PolicySection.model_fields:
        if name != "kwargs" and getattr(section, name) != getattr(usual, name):
            raise ConfigurationError(
                f"policy.{name}={getattr(section, name)!r}: a language model has none; leave it out, and "
                "use policy.kwargs"
            )


# ---- The network.

Network = Any
"""A transformers.PreTrainedModel or peft.PeftModel, which come without types."""

_ADAPTER = "default"
"""peft's name for the first adapter of a model."""


def make_network(section: LanguageSection, seed: int) -> Network:
    """Return the model; with LoRA it has a new adapter, which changes nothing until it is trained."""
    network = _base(section)
    network.requires_grad_(not section.lora)
    if section.lora:
        network = _with_adapter(network, section, seed)
    if section.gradient_checkpointing:
        network.activation_checkpointing_enable({"use_reentrant": False})
    return network.eval()


def _base(section: LanguageSection) -> Network:
    place = place_of("policy.kwargs.model", section.model)
    what = "cannot be read as a causal language model"
    with reading("policy.kwargs.model", section.model, what, SafetensorError):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        _adjust(config)
        with LOADING:
            return AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=getattr(torch, section.dtype),
                use_safetensors=True,
                trust_remote_code=False,
            )


def _adjust(config: Any) -> None:
    for name, value in vars(config).items():
        # Log-probabilities are compared between processes, and with themselves.
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
        # GPT-2's activation in one kernel, where transformers writes the same function as eight.
        if value == "gelu_new":
            setattr(config, name, "gelu_pytorch_tanh")


def _with_adapter(network: Network, section: LanguageSection, seed: int) -> Network:
    names = [f".{name}" for name, _ in network.named_modules()]
    for target in section.targets:
        if not any(name.endswith(f".{target}") for name in names):
            known = ", ".join(sorted(filter(str.isidentifier, {name.rpartition(".")[2] for name in names})))
            where = f"policy.kwargs.targets={list(section.targets)!r}"
            raise ConfigurationError(f"{where}: the model has no layer {target!r}; use some of {known}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapter = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=section.rank,
            lora_alpha=section.alpha,
            target_modules=list(section.targets) or "all-linear",
        )
        with as_configuration_error(f"policy.kwargs.targets={list(section.targets)!r}", ValueError):
            return get_peft_model(network, adapter)


def beside(network: Network) -> Network:
    """Return another network over the same frozen weights, with a copy of the adapter as its own."""
    frozen = {id(weight): weight for weight in network.parameters() if not weight.requires_grad}
    return copy.deepcopy(network, frozen)


def width(network: Network) -> int:
    return int(network.config.get_text_config().hidden_size)


def keep_fewer_activations(network: Network) -> None:
    """Recompute activations in the backward pass; transformers does so in training mode; dropout is off."""
    network.train(torch.is_grad_enabled())


def trained(network: Network) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their names in files of Hugging Face's format."""
    return {
        name.replace(f".{_ADAPTER}", ""): parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def check_alike(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the missing, unknown or misshapen tensors."""
    if own.keys() != given.keys():
        raise ValueError(f"weights: {sorted(own.keys() ^ given.keys())[:8]} on one side only")
    for name, tensor in own.items():
        if tuple(tensor.shape) != tuple(given[name].shape):
            raise ValueError(f"weights.{name}: shape {tuple(given[name].shape)}, not {tuple(tensor.shape)}")


def read(
    network: Network, tokens: Tensor, present: Tensor, place: Tensor, *, has_logits: bool = True
) -> tuple[Tensor, Tensor]:
    """Return logits [n, V], or none, and the last layer's features [n, H], at n places of B·L.

    Only these places go through the last layer, whose output would otherwise be the largest tensor by far.
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


# ---- Critics of a language policy, which stay with the learner.


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
    """A second network over the policy's frozen weights, with another adapter, and a head.

    Its parameters and its `state_dict` are the adapter and the head alone. Neither adapter is ever active in
    the other's network, so that no pass has to switch them, not even one that recomputes activations in the
    backward pass.
    """

    def __init__(self, policy: Network, *, checkpoints: bool) -> None:
        """policy: network with an adapter. checkpoints: recompute activations in the backward pass."""
        super().__init__()
        self.network = beside(policy)
        self.head = ValueHead(width(policy))
        self._checkpoints = checkpoints

    def forward(self, rows: TokenRows) -> Tensor:
        """Return the values V of n places, float32 [n], by another pass over the frozen weights."""
        if self._checkpoints:
            keep_fewer_activations(self.network)
        _, features = read(self.network, rows.tokens, rows.present, rows.place, has_logits=False)
        values: Tensor = self.head(features.float()).float()
        return values

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for part, own in (("adapter", trained(self.network)), ("head", dict(self.head.named_parameters()))):
            yield from ((f"{part}.{name}", parameter) for name, parameter in own.items())

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the trained tensors, which share their memory."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


class LanguagePolicy(nn.Module):
    """A `penstock.policy.tokens.TokenPolicy`. has_reference: without LoRA, keep a copy as the reference."""

    def __init__(self, section: LanguageSection, seed: int, *, has_reference: bool = True) -> None:
        super().__init__()
        self.section = section
        self.network = make_network(section, seed)
        keeps_copy = has_reference and not section.lora
        self._frozen = copy.deepcopy(self.network).requires_grad_(False) if keeps_copy else None
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.critic: ValueHead | AdapterCritic = (
                AdapterCritic(self.network, checkpoints=section.gradient_checkpointing)
                if section.critic == "adapter"
                else ValueHead(width(self.network))
            )

    @property
    def vocabulary(self) -> int:
        return int(self.network.get_output_embeddings().weight.shape[0])

    @property
    def positions(self) -> int | None:
        """Return the most tokens of prompt and response together; None: no limit is known."""
        most: int | None = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        return most

    @property
    def device(self) -> torch.device:
        device: torch.device = self.network.device
        return device

    # ---- what is published

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained and published parameters, by their names in `adapter_model.safetensors`."""
        return trained(self.network)

    @property
    def published(self) -> nn.Module:
        return self

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return `trained`, which shares its memory, without frozen weights and critic."""
        return {name: parameter.detach() for name, parameter in self.trained().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Take what `state_dict` returned; raises ValueError, which names a missing or misshapen tensor."""
        own = self.state_dict()
        check_alike(own, state_dict)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state_dict[name])

    # ---- for the learner

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        if self.section.gradient_checkpointing:
            keep_fewer_activations(self.network)
        logits, features = read(self.network, rows.tokens, rows.present, rows.place)
        log_probs = logits.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return TokenOutputs(_chosen(log_probs, rows.action), entropy, self._values(rows, features))

    def _values(self, rows: TokenRows, features: Tensor) -> Tensor:
        """Return V of the places. features: input of the policy's last layer there, [n, H]."""
        if isinstance(self.critic, AdapterCritic):
            own: Tensor = self.critic(rows)
            return own
        read = features if self.section.shared_trunk else features.detach()
        values: Tensor = self.critic(read.float()).float()
        return values

    @torch.no_grad()
    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        """Return the log-probabilities of the actions under the reference, [n]."""
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

    # ---- for actors

    def load(self, blob: bytes) -> None:
        """Generate with these weights from now on; raises ValueError for those of another policy."""
        load_into(self, blob)

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        """Do nothing: tokens are sampled from the policy."""

    def log_prob(self, observation: Mapping[str, Array], action: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the joint log-probability of each row, float32 [P]. observation, action: rows, [P, L]."""
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
    """Return the policy of a run's `policy` section. learns: with the critic's adapter, if it has one."""
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
