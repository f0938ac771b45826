"""The last reply of this broker to each of the newest sessions.

With it, a held call does not return for what its session knows.

Credit goes down with every Append as well. A lost reply does no harm: the session sends the Append again
and gets the reply again.
"""

from collections import OrderedDict
from typing import Final

MAX_REMEMBERED_SESSIONS: Final = 4096


class LastCredit:
    """One number by session; 0 where nothing was said."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, session: int) -> int:
        return self._numbers.get(session, 0)

    def note(self, session: int, number: int) -> None:
        """This was said now; the session that heard nothing for longest is forgotten."""
        if number == self[session]:
            return
        self._numbers[session] = number
        self._numbers.move_to_end(session)
        if len(self._numbers) > MAX_REMEMBERED_SESSIONS:
            self._numbers.popitem(last=False)

    def forget(self) -> None:
        """Forget every reply: nothing was said to the sessions of another incarnation of the run."""
        self._numbers.clear()
