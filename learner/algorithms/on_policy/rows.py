"""Steps of a batch as the losses read them: flat, without those that are not experience."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from learner.batch import send
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
class Gathered(Steps):
    """Numbers of the steps of all ranks."""

    columns: Tensor


@dataclass(frozen=True, slots=True)
class Rows(Steps):
    """Steps that stand alone, or of one minibatch. inputs: that give [n] outputs; action: by path, [n, *shape].

    whole: rows of all ranks in the minibatch, where these may be one rank's share of them.
    """

    inputs: Inputs
    action: dict[str, Tensor]
    columns: Tensor
    whole: int | None = None

    @property
    def total(self) -> int:
        """What a mean over the minibatch divides by."""
        return self.steps if self.whole is None else self.whole

    def __len__(self) -> int:
        """What an epoch permutes: steps (n)."""
        return self.columns.shape[1]

    def alone(self) -> Inputs:
        """Inputs of the steps, [n]."""
        return self.inputs

    def select(self, index: Tensor) -> "Rows":
        """The rows at an int64 index [m] on the CPU, copied."""
        index = send(index, self.columns.device)
        action = {path: values.index_select(0, index) for path, values in self.action.items()}
        return Rows(self.inputs.select(index), action, self.columns.index_select(1, index))

    def cut(self, sizes: Sequence[tuple[int, int]]) -> Iterator["Rows"]:
        """Minibatches in order, as views. sizes: of each, rows of this rank and of all (`group.Deal`)."""
        start = 0
        for own, total in sizes:
            end = start + own
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.inputs.narrow(start, own), action, self.columns[:, start:end], total)
            start = end
