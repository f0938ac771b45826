"""When a goal may be carried out: by the hour, by the day, by the operator's leave."""

import re
import time
from dataclasses import dataclass
from typing import Final

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_MINUTES: Final = 60


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Hours of the local day in which nothing is injected. begin, end: minutes after midnight.

    They may go over midnight.
    """

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "QuietHours":
        """Return the hours of HH:MM-HH:MM; raises ValueError that says how they are written."""
        found = _HOURS.fullmatch(text)
        if found is None:
            raise ValueError(f"quiet hours {text!r}: write HH:MM-HH:MM, such as 22:00-06:30")
        first, second, third, fourth = map(int, found.groups())
        begin, end = first * _MINUTES + second, third * _MINUTES + fourth
        if begin == end:
            raise ValueError(f"quiet hours {text!r}: begin and end are the same; leave them out for none")
        return cls(begin, end)

    def __str__(self) -> str:
        begin, end = (divmod(one, _MINUTES) for one in (self.begin, self.end))
        return f"{begin[0]:02}:{begin[1]:02}-{end[0]:02}:{end[1]:02}"

    def hold(self, at: float) -> bool:
        """Return whether a moment, Unix time in seconds, lies in them."""
        local = time.localtime(at)
        minute = local.tm_hour * _MINUTES + local.tm_min
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionRules:
    """What holds whatever the policy draws.

    interval_s: seconds between two goals, at least. daily_limit: most goals of a local day. veto_s: seconds
    that an operator has to veto a goal.
    """

    interval_s: float = 30.0
    daily_limit: int = 1000
    quiet: tuple[QuietHours, ...] = ()
    veto_s: float = 0.0

    def forbids(self, at: float, injected_today: int, *, auto: bool) -> str:
        """Return why nothing may be injected at a moment, Unix time in seconds; "" where it may.

        auto: goals are carried out; without it they are only proposed.
        """
        if not auto:
            return "auto is off"
        if any(hours.hold(at) for hours in self.quiet):
            return "quiet hours"
        if injected_today >= self.daily_limit:
            return "daily limit"
        return ""
