"""Lets one browser in: a secret in an address is exchanged, once, for a cookie."""

import hmac
import secrets
import threading
from hashlib import sha256
from typing import Final

SECRET_BYTES: Final = 32
PARAMETER: Final = "secret"


class Admission:
    """Holds digests of the secret, which counts once, and of the cookie that it is exchanged for."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(SECRET_BYTES)
        """Of the address; shown to the person, and nowhere else."""
        self.cookie = f"penstock-{secrets.token_hex(4)}"
        """Name of the cookie: pages on other ports of the same host keep theirs."""
        self._secret: bytes | None = _digest(self.secret)
        self._session: bytes | None = None
        self._lock = threading.Lock()

    def exchange(self, secret: str) -> str | None:
        """Return the value of the cookie for the secret, the first time; None for anything else."""
        with self._lock:
            if self._secret is None or not hmac.compare_digest(_digest(secret), self._secret):
                return None
            self._secret = None
            session = secrets.token_urlsafe(SECRET_BYTES)
            self._session = _digest(session)
            return session

    def admits(self, session: str | None) -> bool:
        held = self._session
        return held is not None and session is not None and hmac.compare_digest(_digest(session), held)


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogateescape")).digest()
