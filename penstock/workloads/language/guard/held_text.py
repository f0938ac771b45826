"""An answer that streams through a guard: nothing leaves before its sentence was checked.

    pieces ─► held ─► sentence ends ─► all so far is checked ─► sentence leaves
                                             └─► blocked: it and all that follows stay

What has left is at every moment a beginning of the answer that has passed as a whole, so a pattern that spans
sentences does not leave whole either.
"""

import re
from typing import Final

from penstock.workloads.language.guard.guard import Guard
from penstock.workloads.language.guard.verdict import PASSED, Direction, Verdict

MAX_HELD: Final = 2_000
"""Characters after which what is held counts as a sentence."""
_END: Final = re.compile(r"[.!?…。！？]+[\"')\]]*\s|\n")  # noqa: RUF001 - ends of sentences in other scripts


class HeldText:
    """One answer. Feed it pieces as they come, and finish it once there are no more."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._left = ""
        self._held = ""
        self.verdict: Verdict = PASSED
        """Of all that was checked so far."""

    @property
    def left(self) -> str:
        """Return all that has left."""
        return self._left

    def feed(self, piece: str) -> str:
        """Take a piece; return what may leave now, often nothing, and nothing ever once it is blocked."""
        if self.verdict.is_blocked:
            return ""
        self._held += piece
        ends = [found.end() for found in _END.finditer(self._held)]
        if ends:
            return self._release(ends[-1])
        return self._release(len(self._held)) if len(self._held) >= MAX_HELD else ""

    def finish(self) -> str:
        """Return the rest, where it may leave."""
        return "" if self.verdict.is_blocked else self._release(len(self._held))

    def _release(self, count: int) -> str:
        sentence, rest = self._held[:count], self._held[count:]
        self.verdict = self._guard.check(self._left + sentence, Direction.OUTPUT)
        if self.verdict.is_blocked:
            self._held = ""
            return ""
        self._left, self._held = self._left + sentence, rest
        return sentence
