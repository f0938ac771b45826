"""What an injector says of itself while it lives, for those who look at its folder: `pulse.json`.

It is written anew at each interval, at most once a second, and not synced: it is only worth something while
the injector goes on.
"""

import json
import time
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

PULSE: Final = "pulse.json"
_LEAST_S: Final = 1.0
_MOST_BYTES: Final = 65_536


class Beat(BaseModel):
    """The state at one interval. at: Unix time in seconds. auto: whether goals are carried out.

    trouble: why nothing was proposed, "" where that went well. ended: it has ended as it should.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    at: float
    auto: bool
    trouble: str
    version: int
    threshold: float
    explore: float
    interval_s: float
    daily_limit: int
    veto_s: float
    quiet: list[str]
    ended: bool = False


class Pulse:
    """Writes the beats of one injector."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / PULSE
        self._next_s = 0.0

    def beat(self, beat: Beat) -> None:
        """Write a beat, unless one of the same second was; the last one is always written. Raises OSError."""
        if time.monotonic() < self._next_s and not beat.ended:
            return
        self._next_s = time.monotonic() + _LEAST_S
        made = self._file.with_suffix(".tmp")
        made.write_text(beat.model_dump_json())
        made.replace(self._file)


def last_beat(folder: Path) -> Beat | None:
    """Return the newest beat of a folder; None where there is none that can be read."""
    try:
        with (folder / PULSE).open("rb") as file:
            content: Any = json.loads(file.read(_MOST_BYTES))
        return Beat.model_validate(content)
    except (OSError, ValueError, ValidationError):
        return None
