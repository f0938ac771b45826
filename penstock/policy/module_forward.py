"""The forward pass in numpy over a torch module's own parameters.

The arrays share their memory with the module, so that weights loaded into it are used from the next call on.
Networks with images, or on a device, stay with torch.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.policy.acting.forward import ACTIVATIONS, Activation, Linear, NumpyForward, NumpyNormaliser
from penstock.policy.layers import Dropout
from penstock.policy.networks import ACTIVATIONS as MODULES
from penstock.policy.networks import Reader

_BY_MODULE: dict[type[nn.Module], Activation] = {MODULES[name]: ACTIVATIONS[name] for name in MODULES}


class ModuleForward(NumpyForward):
    """Runs a chain of linear layers and activations of a module."""

    def __init__(self, reader: Reader, layers: Sequence[nn.Module]) -> None:
        self._tensors: list[Tensor] = []
        normaliser = None
        if reader.normaliser is not None:
            mean, variance = reader.normaliser.mean, reader.normaliser.variance
            normaliser = NumpyNormaliser(mean.numpy(), variance.numpy(), reader.normaliser.clip)
            self._tensors += [mean, variance]
        super().__init__(reader.layout, normaliser, [self._taken(layer) for layer in layers])
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def is_current(self) -> bool:
        """Return False once a parameter lies elsewhere than when this was made."""
        return [tensor.data_ptr() for tensor in self._tensors] == self._addresses

    def _taken(self, layer: nn.Module) -> Linear | Activation:
        if isinstance(layer, nn.Linear):
            self._tensors += [layer.weight, layer.bias]
            return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
        return _BY_MODULE[type(layer)]


def module_forward(
    reader: Reader, chain: Sequence[nn.Module] | None, head: nn.Linear
) -> ModuleForward | None:
    """Return the chain and the head behind it, or None where torch must do it.

    Torch must do it for images, for a network that is no chain, for another kind of layer, or off the CPU.
    """
    if reader.images or chain is None or head.weight.device.type != "cpu":
        return None
    # Acting drops no features.
    layers = [layer for layer in (*chain, head) if not isinstance(layer, Dropout)]
    if not all(isinstance(layer, nn.Linear) or type(layer) in _BY_MODULE for layer in layers):
        return None
    return ModuleForward(reader, layers)
