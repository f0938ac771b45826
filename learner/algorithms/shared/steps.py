"""Steps as losses read them: six numbers each, in columns."""

from dataclasses import dataclass

from torch import Tensor


class Steps:
    """n valid steps. columns: [6, n], by these names."""

    __slots__ = ()
    columns: Tensor

    @property
    def steps(self) -> int:
        """Return how many steps there are (n)."""
        return self.columns.shape[1]

    @property
    def anchor(self) -> Tensor:
        """Return the log-probability that the ratio is taken to, [n]."""
        return self.columns[0]

    @property
    def weighted_advantage(self) -> Tensor:
        """Return advantage times behaviour weight, [n]."""
        return self.columns[1]

    @property
    def target(self) -> Tensor:
        """Return the value that the critic is drawn to, [n]."""
        return self.columns[2]

    @property
    def old_value(self) -> Tensor:
        """Return V at the start of the batch, [n]."""
        return self.columns[3]

    @property
    def behaviour(self) -> Tensor:
        """Return log μ(a|s) under the behaviour policy, [n]."""
        return self.columns[4]

    @property
    def proximal(self) -> Tensor:
        """Return log π_prox(a|s) under the proximal policy, [n]."""
        return self.columns[5]


@dataclass(frozen=True, slots=True)
class AllRankSteps(Steps):
    """Holds the steps of all ranks together, after an epoch. columns: [6, n], as of `Steps`."""

    columns: Tensor
