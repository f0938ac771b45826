"""Steps as losses read them: six numbers each, in columns of a tensor or of an array."""

from dataclasses import dataclass

from torch import Tensor

from penstock.policy.numbers import Numbers


class Steps:
    """n valid steps. columns: [6, n], by these names."""

    __slots__ = ()
    columns: Numbers

    @property
    def steps(self) -> int:
        """Return how many steps there are (n)."""
        return int(self.columns.shape[1])

    @property
    def anchor(self) -> Numbers:
        """Return the log-probability that the ratio is taken to, [n]."""
        return self.columns[0]

    @property
    def weighted_advantage(self) -> Numbers:
        """Return advantage times behaviour weight, [n]."""
        return self.columns[1]

    @property
    def target(self) -> Numbers:
        """Return the value that the critic is drawn to, [n]."""
        return self.columns[2]

    @property
    def old_value(self) -> Numbers:
        """Return V at the start of the batch, [n]."""
        return self.columns[3]

    @property
    def behaviour(self) -> Numbers:
        """Return log μ(a|s) under the behaviour policy, [n]."""
        return self.columns[4]

    @property
    def proximal(self) -> Numbers:
        """Return log π_prox(a|s) under the proximal policy, [n]."""
        return self.columns[5]


@dataclass(frozen=True, slots=True)
class AllRankSteps(Steps):
    """Holds the steps of all ranks together, after an epoch. columns: [6, n], as of `Steps`."""

    columns: Tensor
