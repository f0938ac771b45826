"""Who has the next dry run: one goes on at a time, and projects take turns.

    ask ─► waits, at most WAIT_S ─► has the turn ─► done          MOST_OF_PROJECT, and one a caller, at a time

The turn is that of the project that had it longest ago: one that asks without end waits for all others in
between. A caller waits without a thread, of which a gateway has some dozens for everything.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

WAIT_S: Final = 120.0
"""Longest time in which a caller waits for a turn."""
MOST_OF_PROJECT: Final = 4
"""Dry runs of a project that go on or wait; of one person or program it is one."""
AGAIN_S: Final = 30.0
"""After which who had no turn may ask again."""
LOOK_S: Final = 0.1


class NoTurn(Exception):
    """Reports a caller who gets no turn now; the message says why, and what to do.

    is_own: they, or their project, have as many as they may have.
    """

    def __init__(self, message: str, *, is_own: bool) -> None:
        super().__init__(message)
        self.is_own = is_own


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    project: str
    subject: str


class DryRunTurns:
    """The turns of one gateway; safe between threads and event loops."""

    def __init__(self, wait_s: float = WAIT_S, look_s: float = LOOK_S) -> None:
        self._wait_s, self._look_s = wait_s, look_s
        self._changing = threading.Lock()
        self._has_turn: _Ticket | None = None
        self._waiting = list[_Ticket]()
        self._served = dict[str, int]()

    @asynccontextmanager
    async def turn(
        self, project: str, subject: str, goes_on: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Have the turn inside the block; raises NoTurn.

        goes_on: whether there is still somebody who waits for it.
        """
        ticket = self._ask(project, subject)
        try:
            until_s = asyncio.get_running_loop().time() + self._wait_s
            while not self._take(ticket):
                if asyncio.get_running_loop().time() >= until_s or not await goes_on():
                    raise NoTurn(
                        f"dry runs of others have taken {self._wait_s:g} s: ask again, or train without one",
                        is_own=False,
                    )
                await asyncio.sleep(self._look_s)
            yield
        finally:
            self._leave(ticket)

    def _ask(self, project: str, subject: str) -> _Ticket:
        with self._changing:
            there = [*self._waiting, *([self._has_turn] if self._has_turn is not None else [])]
            if any(one.subject == subject for one in there):
                raise NoTurn("a dry run of yours goes on or waits: ask again when it is done", is_own=True)
            if sum(one.project == project for one in there) >= MOST_OF_PROJECT:
                raise NoTurn(
                    f"{MOST_OF_PROJECT} dry runs of this project go on or wait: ask again when one is done",
                    is_own=True,
                )
            ticket = _Ticket(project, subject)
            self._waiting.append(ticket)
            return ticket

    def _take(self, ticket: _Ticket) -> bool:
        """Return whether a ticket has the turn now."""
        with self._changing:
            if self._has_turn is not None:
                return False
            if ticket is not min(self._waiting, key=lambda one: self._served.get(one.project, 0)):
                return False
            self._waiting.remove(ticket)
            self._has_turn = ticket
            self._served[ticket.project] = max(self._served.values(), default=0) + 1
            return True

    def _leave(self, ticket: _Ticket) -> None:
        with self._changing:
            if self._has_turn is ticket:
                self._has_turn = None
            else:
                self._waiting.remove(ticket)
