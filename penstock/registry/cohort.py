"""Order episodes of one arm by their beginning, as `safety` requires.

Among episodes that run side by side the short ones end first. Where long episodes are good ones, the first
that a new canary's clients end are its worst, and it would be withdrawn though it is as good as the active
version. So an outcome waits until all episodes that began before it have ended. At most `limit` are held;
then the oldest that still runs is given up, and counted.
"""

from typing import Final

from penstock.registry.bounds import Outcome

MAX_HELD: Final = 4096


class Cohort:
    """Holds the open episodes of an arm; one thread uses it. Tickets are numbers, given in order."""

    def __init__(self, limit: int = MAX_HELD) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: must be 1 or more")
        self._limit = limit
        self._begun = 0
        self._released = 0
        self._ended: dict[int, Outcome | None] = {}
        self.given_up = 0
        """Episodes that ran longer than `limit` others took to begin.

        They bias the test when they are many.
        """

    @property
    def held(self) -> int:
        """Return the number of episodes that run or wait."""
        return self._begun - self._released

    def begin(self) -> int:
        """Return the ticket of an episode that begins."""
        self._begun += 1
        return self._begun - 1

    def end(self, ticket: int, outcome: Outcome | None) -> list[Outcome]:
        """Return the outcomes whose turn has come, oldest first.

        Whether an episode counts must not depend on how it went. A ticket that was given up, or has ended
        before, is ignored; raises ValueError for one that was never given. outcome: None for an episode that
        is not to count.
        """
        if not 0 <= ticket < self._begun:
            raise ValueError(f"ticket={ticket}: {self._begun} were given, from 0 on; use the one of `begin`")
        if ticket >= self._released:
            self._ended.setdefault(ticket, outcome)
        return self._release()

    def _release(self) -> list[Outcome]:
        turn = []
        while self.held > self._limit or self._released in self._ended:
            if self._released not in self._ended:
                self.given_up += 1
            outcome = self._ended.pop(self._released, None)
            self._released += 1
            if outcome is not None:
                turn.append(outcome)
        return turn
