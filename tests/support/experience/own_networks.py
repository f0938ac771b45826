"""Networks that a user might write: one that is right, and one for each way to be wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.policy.networks import BatchNorm, Dropout, Inputs, Reader

WIDTH = 12


class Good(nn.Module):
    """One hidden layer with everything that a policy allows."""

    def __init__(self, reader: Reader, scale: float = 1.0) -> None:
        super().__init__()
        self.width = WIDTH
        self.scale = scale
        self.layer = nn.Linear(reader.width, WIDTH)
        self.norm, self.dropout = BatchNorm(WIDTH), Dropout(0.25)

    def forward(self, inputs: Inputs) -> Tensor:
        features: Tensor = self.dropout(self.norm(self.layer(inputs.vector)).tanh()) * self.scale
        return features


def _altered(name: str, change: Callable[[Tensor], Any]) -> type[Good]:
    """The good one, but for its features."""

    def forward(self: Good, inputs: Inputs) -> Any:
        return change(Good.forward(self, inputs))

    return type(name, (Good,), {"forward": forward, "__module__": __name__})


TooNarrow = _altered("TooNarrow", lambda features: features[:, 1:])
OneRow = _altered("OneRow", lambda features: features.mean(0))
Double = _altered("Double", Tensor.double)
NotFinite = _altered("NotFinite", lambda features: features / (features - features))
Numbers = _altered("Numbers", Tensor.tolist)
LooksAround = _altered("LooksAround", lambda features: features - features.mean(0))


class DoubleWeights(Good):
    """Parameters of another dtype."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))


class Raises(Good):
    """A programming error."""

    def forward(self, inputs: Inputs) -> Tensor:
        result: Tensor = self.layer(inputs.vector) @ torch.zeros(3, 3)
        return result


class RaisesAtOnce(Good):
    """In its constructor."""

    def __init__(self, reader: Reader) -> None:
        raise RuntimeError("no such file")


class Writes(Good):
    """In place, into what the next epoch reads again."""

    def forward(self, inputs: Inputs) -> Tensor:
        inputs.vector.mul_(0.5)
        return super().forward(inputs)


class Remembers(Good):
    """Counts its calls."""

    calls = 0

    def forward(self, inputs: Inputs) -> Tensor:
        self.calls += 1
        return super().forward(inputs) + self.calls


class TorchDropout(Good):
    """With a layer that drops only in training mode."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.torchs = nn.Dropout(0.5)

    def forward(self, inputs: Inputs) -> Tensor:
        features: Tensor = self.torchs(super().forward(inputs))
        return features


class TorchBatchNorm(Good):
    """With a layer that depends on the batch only in training mode."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.torchs = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Inputs) -> Tensor:
        features: Tensor = self.torchs(super().forward(inputs))
        return features


class Frozen(Good):
    """With a parameter that is not trained."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.layer.weight.requires_grad = False


class NoWidth(nn.Module):
    """Does not say how many features it gives."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.layer = nn.Linear(reader.width, WIDTH)


class Huge(Good):
    """More tensors than the header of a publication names."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.many = nn.ParameterList(torch.zeros(1) for _ in range(8000))


class NoModule:
    """Not a Module."""

    width = WIDTH

    def __init__(self, reader: Reader) -> None:
        self.reader = reader


def make(reader: Reader) -> Good:
    """A function: a run from elsewhere that names a module of ours shall not call what it likes in it."""
    return Good(reader)


NOTHING = None
