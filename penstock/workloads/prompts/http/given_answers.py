"""The last answers that were given, which transitions are matched with.

A transition counts with the version and the log-probability of the answer that its action came from, not with
what a caller says of them. An answer is used once: a transition that comes again with its ticket is the same
one. A transition without ticket takes any unused answer that fits, and leaves it to the one that names it.
"""

import hashlib
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.protocol.tensor import Array

KEPT: Final = 4096
"""Answers of one caller that are remembered."""
CALLERS: Final = 64
"""Callers whose answers are remembered; the one that was longest silent is forgotten first."""

StateKey = bytes


def state_key(state: Array) -> StateKey:
    """Return what an embedding, float32 [1536], is known by."""
    # -0.0 and 0.0 are one number in two forms.
    return hashlib.blake2b((np.asarray(state, np.float32) + np.float32(0)).tobytes(), digest_size=16).digest()


@dataclass(slots=True, kw_only=True, eq=False)
class GivenAnswer:
    """An answer. log_prob: None where the action was not drawn. is_used: a transition belongs to it.

    found_for: that transition, where it came without ticket.
    """

    ticket: str
    state: StateKey
    action: int
    log_prob: float | None
    version: int
    is_used: bool = False
    found_for: bytes = b""


class GivenAnswers:
    """Remembers the answers of each caller; used by one event loop."""

    def __init__(self, kept: int = KEPT, callers: int = CALLERS) -> None:
        self._kept, self._most = kept, callers
        self._callers: OrderedDict[str, _OfCaller] = OrderedDict()

    def give(
        self, caller: str, state: StateKey, action: int, log_prob: float | None, version: int
    ) -> GivenAnswer:
        """Remember an answer, with a ticket of its own."""
        ticket = secrets.token_hex(12)
        given = GivenAnswer(ticket=ticket, state=state, action=action, log_prob=log_prob, version=version)
        self._of(caller).add(given, self._kept)
        return given

    def by_ticket(self, caller: str, ticket: str) -> GivenAnswer | None:
        """Return the answer of a ticket, used or not; None where it is not remembered."""
        return self._of(caller).by_ticket.get(ticket)

    def unused(self, caller: str, state: StateKey, action: int) -> GivenAnswer | None:
        """Return the newest answer to a state that named this action and that no transition belongs to."""
        found = self._of(caller).by_place.get((state, action), ())
        return next((one for one in reversed(found) if not one.is_used), None)

    def leave_to(self, caller: str, given: GivenAnswer, transition: bytes) -> None:
        """Free an answer that was found for a transition without ticket, for the one that names it.

        transition: the one that names it. The other one goes over to another unused answer. Where there is
        none, both are the same, and the answer stays used, or they are not, and both count.
        """
        if not given.found_for:
            return
        other = self.unused(caller, given.state, given.action)
        if other is not None:
            other.is_used, other.found_for = True, given.found_for
        given.is_used = other is None and given.found_for == transition
        given.found_for = b""

    def _of(self, caller: str) -> "_OfCaller":
        found = self._callers.get(caller)
        if found is None:
            found = self._callers[caller] = _OfCaller()
            if len(self._callers) > self._most:
                self._callers.popitem(last=False)
        self._callers.move_to_end(caller)
        return found


class _OfCaller:
    def __init__(self) -> None:
        self.by_ticket: OrderedDict[str, GivenAnswer] = OrderedDict()
        self.by_place: dict[tuple[StateKey, int], deque[GivenAnswer]] = {}

    def add(self, given: GivenAnswer, kept: int) -> None:
        """Remember an answer, and forget the oldest beyond `kept`."""
        self.by_ticket[given.ticket] = given
        self.by_place.setdefault((given.state, given.action), deque()).append(given)
        if len(self.by_ticket) > kept:
            _, oldest = self.by_ticket.popitem(last=False)
            place = (oldest.state, oldest.action)
            same = self.by_place[place]
            same.popleft()  # of one place they stand in the order in which they were given
            if not same:
                del self.by_place[place]
