"""Whether a text is blocked, and by what."""

from dataclasses import dataclass
from enum import StrEnum


class Direction(StrEnum):
    """Whose text it is: `input` what people say, `output` what a model says."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guard says of a text. by: "" where it may pass, else `rule:NAME`, `classifier`, `error`."""

    by: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether the text must not pass."""
        return bool(self.by)


PASSED = Verdict()
