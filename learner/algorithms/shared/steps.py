"""Steps as losses read them: six numbers each, in columns."""

from dataclasses import dataclass

from torch import Tensor


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
        """Return log μ(a|s) under the behaviour policy."""
        return self.columns[4]

    @property
    def proximal(self) -> Tensor:
        """Return log π_prox(a|s) under the proximal policy."""
        return self.columns[5]


@dataclass(frozen=True, slots=True)
class AllRankSteps(Steps):
    """Those of all ranks together, after an epoch."""

    columns: Tensor
