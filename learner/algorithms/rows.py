"""Steps of a batch as the losses read them: flat, without those that are not experience."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from penstock.policy.networks import Inputs


class Steps:
    """n valid steps. columns: [6, n], by these names."""

    __slots__ = ()
    columns: Tensor

    @property
    def steps(self) -> int:
        """How many (n)."""
        return self.columns.shape[1]

    @property
    def anchor(self) -> Tensor:
        """Log-probability that the ratio is taken to."""
        return self.columns[0]

    @property
    def weighted_advantage(self) -> Tensor:
        """Advantage times behaviour weight."""
        return self.columns[1]

    @property
    def target(self) -> Tensor:
        """What the critic is drawn to."""
        return self.columns[2]

    @property
    def old_value(self) -> Tensor:
        """V at the start of the batch."""
        return self.columns[3]

    @property
    def behaviour(self) -> Tensor:
        """Log μ."""
        return self.columns[4]

    @property
    def proximal(self) -> Tensor:
        """Log π_prox."""
        return self.columns[5]


@dataclass(frozen=True, slots=True)
class Rows(Steps):
    """Steps that stand alone, or of one minibatch. inputs: that give [n] outputs; action: by path, [n, *shape]."""

    inputs: Inputs
    action: dict[str, Tensor]
    columns: Tensor

    def __len__(self) -> int:
        """What an epoch permutes: steps (n)."""
        return self.columns.shape[1]

    def alone(self) -> Inputs:
        """Inputs of the steps, [n]."""
        return self.inputs

    def select(self, index: Tensor) -> "Rows":
        """The rows at an int64 index [m], copied."""
        index = index.to(self.columns.device)
        action = {path: values.index_select(0, index) for path, values in self.action.items()}
        return Rows(self.inputs.select(index), action, self.columns.index_select(1, index))

    def cut(self, pieces: int) -> Iterator["Rows"]:
        """As many nearly equal parts, in order, as views; fewer when there are fewer rows."""
        pieces = min(pieces, len(self))
        edges = [len(self) * i // pieces for i in range(pieces + 1)]
        for start, end in pairwise(edges):
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.inputs.narrow(start, end - start), action, self.columns[:, start:end])
