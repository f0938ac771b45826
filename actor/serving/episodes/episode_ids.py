"""Ids of episodes, which prove that they were given, and to whom: `SERVER-NUMBER-TOKEN`.

SERVER is drawn when the server starts, NUMBER counts its episodes, TOKEN is a keyed hash (HMAC-SHA256, RFC
2104) of the number and of who was given it. So an id is checked without being remembered: of an episode that
is forgotten it is still known that it was one, and whose. A client cannot make an id up, or use another
client's.
The key never leaves the process; another server, or this one after a restart, sees that an id is not its own.
"""

import hmac
import re
import secrets
from typing import Final

from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.rpc.identity import Identity

_GRAMMAR: Final = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,15})-([0-9a-f]{12})", re.ASCII)
_TOKEN_DIGITS: Final = 12


class EpisodeIds:
    """Gives and checks the ids of one server."""

    def __init__(self) -> None:
        self.server = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)

    def give(self, number: int, owner: Identity | None) -> str:
        """Return the id of episode `number` of this owner; None: on a server that asks for no identity."""
        return f"{self.server}-{number}-{self._token(number, owner)}"

    def check(self, episode_id: str, owner: Identity | None) -> None:
        """Raise Refused unless this very id was given to this owner here.

        EPISODE_ELSEWHERE: it is another server's. EPISODE_UNKNOWN: it was not given, or to another owner.
        """
        match = _GRAMMAR.fullmatch(episode_id)
        if match is None:
            raise unknown(episode_id, "no such id was ever given")
        server, number, token = match.groups()
        if server != self.server:
            text = f"episode_id={episode_id!r} is of server {server}, this is {self.server}: start a new one"
            raise Refused(Refusal(reason=Reason.EPISODE_ELSEWHERE, detail=text))
        if not hmac.compare_digest(token, self._token(int(number), owner)):
            raise unknown(episode_id, "it was not given to this client")

    def _token(self, number: int, owner: Identity | None) -> str:
        said = f"{number} {'' if owner is None else owner}".encode()
        return hmac.digest(self._key, said, "sha256").hex()[:_TOKEN_DIGITS]


def unknown(episode_id: str, why: str) -> Refused:
    """Return the refusal (EPISODE_UNKNOWN) of an id, which may be of any length."""
    text = f"episode_id={episode_id[:80]!r}: {why}"
    return Refused(Refusal(reason=Reason.EPISODE_UNKNOWN, detail=text))
