"""Bearer tokens: how a server knows them, how a client shows them. Only ever over TLS.

The server's file has a line `SHA256 penstock://RUN/PARTY[/NAME]` per token and no token itself, so a
reader of it can call no server. It is read again when it changes: a token is taken back by deleting its line,
and rotated by having both lines for a while. The client's file holds the token alone.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from penstock.rpc.identity import Identity, Unidentified, parse

log = logging.getLogger(__name__)

SCHEME: Final = "Bearer "
MAX_TOKEN_LENGTH: Final = 512
_DIGEST_LENGTH: Final = 64


def digest(secret: str) -> str:
    """Return the digest by which the file knows a token, and Redis a password."""
    return hashlib.sha256(secret.encode()).hexdigest()


def line(identity: Identity, token: str) -> str:
    """Return the server's line for a token."""
    return f"{digest(token)} {identity}\n"


class AcceptedTokens:
    """The server's side; raises ValueError that names the line when the file cannot be used."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamp = _stamp(file)
        self._known = _read(file)

    def identify(self, header: str) -> Identity:
        """Return whose token an `authorization` header shows; raises Unidentified."""
        if not header.startswith(SCHEME) or len(header) > MAX_TOKEN_LENGTH:
            raise Unidentified("send a token: `authorization: Bearer …` (security.token_file)")
        # The time of the search tells at most something of a digest, and no token can be made from that.
        found = self._current().get(digest(header.removeprefix(SCHEME)))
        if found is None:
            raise Unidentified("this token is not known here (any more)")
        return found

    def _current(self) -> dict[str, Identity]:
        """Return identities by digest, by the file as it is now; a broken or missing one changes nothing."""
        with self._lock:
            try:
                stamp = _stamp(self._file)
                if stamp != self._stamp:
                    self._known, self._stamp, self._complaint = _read(self._file), stamp, ""
            except (OSError, ValueError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("the accepted tokens cannot be read now, the old ones stay: %s", error)
            return self._known


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(file: Path) -> dict[str, Identity]:
    known = {}
    for number, text in enumerate(file.read_text().splitlines(), 1):
        words = text.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or len(words[0]) != _DIGEST_LENGTH or not words[0].isalnum():
            raise ValueError(f"{file}:{number}: write SHA256 penstock://RUN/PARTY[/NAME]")
        try:
            known[words[0].lower()] = parse(words[1])
        except Unidentified as error:
            raise ValueError(f"{file}:{number}: {error}") from error
    return known


class TokenFile(grpc.AuthMetadataPlugin):
    """The client's side: the token is read for every call, so a new one counts at once."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, _context: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        """Give gRPC the header."""
        try:
            token = self._file.read_text().strip()
        except OSError as error:
            callback((), error)
        else:
            callback((("authorization", f"{SCHEME}{token}"),), None)
