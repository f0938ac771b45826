"""How much of one person counts, and why a row does not.

deleted     the person is gone, and so are the ratings
repeated    the same person rated the same response for the same thing again; the newest row counts
over_cap    the person has had as many ratings in a day as count
liar        the person says the opposite of what others say
"""

from dataclasses import dataclass
from enum import StrEnum

from penstock.config.configuration_error import ConfigurationError


class Reason(StrEnum):
    """Why a row does not count."""

    DELETED = "deleted"
    REPEATED = "repeated"
    OVER_CAP = "over_cap"
    LIAR = "liar"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingRules:
    """Numbers of the filter.

    daily_cap: most rows of a person that count in 24 hours. false_alarms: bound of the chance that anybody
    who is honest is taken for a liar. least: fewest thumbs of a person by which that is judged.

    Raises ConfigurationError that names a number which does not fit.
    """

    daily_cap: int = 200
    false_alarms: float = 0.01
    least: int = 10

    def __post_init__(self) -> None:
        if self.daily_cap < 1:
            raise ConfigurationError(f"daily_cap={self.daily_cap}: must be at least 1")
        if not 0 < self.false_alarms < 1:
            raise ConfigurationError(f"false_alarms={self.false_alarms}: must lie between 0 and 1")
        if self.least < 1:
            raise ConfigurationError(f"least={self.least}: must be at least 1")
