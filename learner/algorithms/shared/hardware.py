"""What an update runs on, as far as an algorithm must know: its other ranks, precision, compilation."""

from dataclasses import dataclass, field

from penstock.config.settings import LearnerSection
from penstock.learner.algorithms.shared.rank_group import RankGroup, SingleRankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Describes what the networks of an update run on.

    group: the ranks. bfloat16: networks run in mixed precision. compiled: they go through `torch.compile`.
    """

    group: RankGroup = field(default_factory=SingleRankGroup)
    bfloat16: bool = False
    compiled: bool = False


def hardware_of(section: LearnerSection, group: RankGroup) -> Hardware:
    """Return the hardware that the settings ask for."""
    return Hardware(group=group, bfloat16=section.precision == "bfloat16", compiled=section.compile)
