"""Networks of the user's: `policy.network = "module:Class"` in the place of trunks and MLP.

`load` imports the module: a process that received the name from another one calls
`penstock.config.trusted` first. The network is tried before anything is learned with it, so that
a broken one is refused where it is configured and not by a loss that is not finite an hour later.
"""

import copy
import importlib
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.networks import Body, Inputs, Reader
from penstock.policy.weights import decode, encode
from penstock.protocol.spaces import leaves, sample

_ROWS = 5
_TOLERANCE = 1e-3
"""Kernels for one row and for many round differently; what depends on the neighbours differs by more."""


class Network(Protocol):
    """The contract of the class, beside that of a `torch.nn.Module`.

    It is constructed as `Class(reader, **policy.network_arguments)`, after torch's generator was seeded,
    and initialises itself. A policy has one for the actor and one for the critic, or one for both
    (`policy.shared_trunk`). `reader` describes the inputs: `reader.width` columns of vector,
    `reader.columns[path]` those of a part, `reader.images` path and space of each image.

    In `forward` a row must not depend on its neighbours, on earlier calls or on training mode, and inputs
    are not written to: actor, π_prox and every gradient step must get the same features of the same
    observation. `penstock.policy.layers` has dropout and batch normalisation that satisfy this.
    Parameters are float32 and all are trained; buffers are published and kept with them.
    """

    width: int
    """F, the number of features that it returns."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return features [M, F] of `Inputs` of M rows, in the dtype of `inputs.vector`, with gradients."""
        ...


class CustomBody(nn.Module):
    """Wraps a network of the user's as a body."""

    chain = None

    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        self.network = network
        self.width = width

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features [M, F]."""
        features: Tensor = self.network(inputs)
        return features


def body_of(reader: Reader, section: PolicySection) -> Body | CustomBody:
    """Return the network between inputs and heads.

    Raises ConfigurationError for a custom one that breaks its contract.
    """
    if not section.network:
        return Body(reader, section)
    name = f"policy.network={section.network!r}"
    network = _construct(name, reader, section)
    width = _width(name, network)
    _check_weights(name, network)
    # A network that is not the same in training mode may have changed by trying it.
    _check_features(name, copy.deepcopy(network), width, reader)
    return CustomBody(network, width)


def load(name: str) -> type[nn.Module]:
    """Import the module and return the class of `module:Class`.

    Raises ConfigurationError that says what is wrong.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"policy.network={name!r}: write module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigurationError(
            f"policy.network={name!r}: cannot be loaded: {_said(error)}; is its folder on PYTHONPATH?"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigurationError(f"policy.network={name!r}: {found!r}, must be a class of torch.nn.Module")
    return found


def _construct(name: str, reader: Reader, section: PolicySection) -> nn.Module:
    make, arguments = load(section.network), section.network_arguments
    try:
        return make(reader, **arguments)
    except Exception as error:
        raise ConfigurationError(
            f"{name}: made with policy.network_arguments={arguments!r} it raised {_said(error)}"
        ) from error


def _width(name: str, network: nn.Module) -> int:
    width = getattr(network, "width", None)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ConfigurationError(f"{name}: width={width!r}; say how many features it gives as `self.width`")
    return width


def _check_weights(name: str, network: nn.Module) -> None:
    parameters = dict(network.named_parameters())
    other = [f"{key} {tensor.dtype}" for key, tensor in parameters.items() if tensor.dtype != torch.float32]
    if other:
        raise ConfigurationError(f"{name}: parameters {other[:4]}, must be torch.float32")
    frozen = [key for key, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ConfigurationError(f"{name}: parameters {frozen[:4]} take no gradient; make them buffers")
    try:
        decode(encode(network))
    except Exception as error:
        raise ConfigurationError(f"{name}: its weights cannot be published: {_said(error)}") from error


def _check_features(name: str, network: nn.Module, width: int, reader: Reader) -> None:
    """Raise ConfigurationError unless features depend on their own row alone, in every mode.

    One row and several, in evaluation and in training mode, must give the same, and leave inputs unchanged.
    """
    inputs = _sample_inputs(reader)
    given = Inputs(inputs.vector.clone(), tuple(image.clone() for image in inputs.images))
    features = _features(name, network.eval(), inputs, width)
    if not torch.isfinite(features).all():
        raise ConfigurationError(f"{name}: features of a finite observation hold NaN or infinity")
    if not _alike(given.vector, inputs.vector) or not all(map(_alike, given.images, inputs.images)):
        raise ConfigurationError(f"{name}: forward writes to its inputs; copy them first")
    if not _alike(_features(name, network, inputs, width), features):
        raise ConfigurationError(
            f"{name}: a second call gives other features; forward must depend on its inputs alone"
        )
    if not _alike(_features(name, network, inputs.narrow(0, 1), width), features[:1]):
        raise ConfigurationError(
            f"{name}: features of a row depend on the rows beside it; treat each row alone"
        )
    if not _alike(_features(name, network.train(), inputs, width), features):
        raise ConfigurationError(
            f"{name}: training mode gives other features; use Dropout and BatchNorm of "
            "penstock.policy.layers, which every forward pass of actor and learner has in common"
        )


def _features(name: str, network: nn.Module, inputs: Inputs, width: int) -> Tensor:
    rows = len(inputs.vector)
    try:
        features = network(inputs)
    except Exception as error:
        raise ConfigurationError(f"{name}: forward raised {_said(error)} for {rows} rows") from error
    if not isinstance(features, Tensor):
        raise ConfigurationError(f"{name}: forward gives a {type(features).__name__}, must be a Tensor")
    if features.shape != (rows, width) or features.dtype != inputs.vector.dtype:
        raise ConfigurationError(
            f"{name}: forward gives {features.dtype}{tuple(features.shape)} for {rows} rows, must be "
            f"{inputs.vector.dtype}{(rows, width)}, as its width says"
        )
    return features.detach()


def _sample_inputs(reader: Reader) -> Inputs:
    """Return inputs of observations drawn within their bounds."""
    random = np.random.default_rng(0)
    drawn = {path: sample(leaf, _ROWS, random) for path, leaf in leaves(reader.space, "observation")}
    return reader.read({path: torch.from_numpy(array) for path, array in drawn.items()}, torch.float32)


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
