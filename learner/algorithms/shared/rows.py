"""Steps of a batch as the losses read them: flat, without those that are not experience."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.learner.algorithms.shared.steps import Steps
from penstock.learner.batch import send
from penstock.policy.networks import Inputs
from penstock.policy.numbers import Numbers


@dataclass(frozen=True, slots=True)
class Rows(Steps):
    """Steps that stand alone, or of one minibatch.

    inputs: they give [n] outputs.   action: by path, [n, *shape].
    whole: rows of all ranks in the minibatch, where these may be one rank's share of them.
    """

    inputs: Inputs
    action: dict[str, Numbers]
    columns: Numbers
    whole: int | None = None

    @property
    def total(self) -> int:
        """Return the number of rows that a mean over the minibatch divides by."""
        return self.steps if self.whole is None else self.whole

    def __len__(self) -> int:
        """Return what an epoch permutes: steps (n)."""
        return self.steps

    def alone(self) -> Inputs:
        """Inputs of the steps, [n]."""
        return self.inputs

    def select(self, index: Tensor) -> "Rows":
        """Return the rows at an int64 index [m] on the CPU, copied."""
        index = send(index, self.columns.device)
        action = {path: values.index_select(0, index) for path, values in self.action.items()}
        return Rows(self.inputs.select(index), action, self.columns.index_select(1, index))

    def in_arrays(self) -> "Rows":
        """Return these rows, which lie on the CPU, with actions and columns as arrays of the same memory."""
        action = {path: values.numpy() for path, values in self.action.items()}
        return replace(self, action=action, columns=self.columns.numpy())

    def cut(self, sizes: Sequence[tuple[int, int]]) -> Iterator["Rows"]:
        """Yield minibatches of the n rows in order, as views, [m] rows each.

        sizes: of each, rows of this rank and of all (`rank_group.MinibatchSplit`).
        """
        start = 0
        for own, total in sizes:
            end = start + own
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.inputs.narrow(start, own), action, self.columns[:, start:end], total)
            start = end
